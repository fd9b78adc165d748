def extra_keys(start, end, salt, adapter, images):
    inside = [
        (digest, position - start)
        for position, length, digest in images
        if position < end and position + length > start
    ]
    return (("salt", salt if start == 0 else None), ("adapter", adapter), ("images", inside))
