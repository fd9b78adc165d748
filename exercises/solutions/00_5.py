def first_bad_field(body, rules):
    for name, value in body.items():
        if name not in rules:
            return name
        kind, low, high = rules[name]
        types = int if kind == "integer" else (int, float)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, types):
            return name
        if not low <= value <= high:  # false for NaN too
            return name
    return None
