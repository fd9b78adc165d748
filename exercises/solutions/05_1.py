import hashlib


def block_names(token_ids, block_size, salt=None):
    names, parent = [], repr(salt).encode()
    for end in range(block_size, len(token_ids) + 1, block_size):
        tokens = repr(list(token_ids[end - block_size : end])).encode()
        parent = hashlib.sha256(hashlib.sha256(parent).digest() + tokens).digest()
        names.append(parent)
    return names
