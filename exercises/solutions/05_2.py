def find_prefix(token_ids, names, cached, block_size):
    found = []
    for name in names[: (len(token_ids) - 1) // block_size]:
        if name not in cached:
            break
        found.append(cached[name])
    return found
