def write_kv(key_cache, value_cache, key, value, slot_mapping):
    real = slot_mapping >= 0
    slots = slot_mapping[real]
    block_size = key_cache.shape[1]
    key_cache[slots // block_size, slots % block_size] = key[real]
    value_cache[slots // block_size, slots % block_size] = value[real]
