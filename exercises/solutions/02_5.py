def key_bounds(past, num_new, index, tile_queries, tile_keys):
    first = index * tile_queries
    end = past + min(first + tile_queries, num_new)
    # The first query sees the fewest keys: those before it, and its own.
    every = (past + first + 1) // tile_keys * tile_keys
    return every, end
