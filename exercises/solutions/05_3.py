def admit(free, refs, hits, num_blocks):
    num_new = num_blocks - len(hits)
    if num_new > len(free) - sum(refs[block] == 0 for block in hits):
        return None
    for block in hits:
        if refs[block] == 0:
            free.remove(block)
        refs[block] += 1
    new = [free.pop(0) for _ in range(num_new)]
    for block in new:
        refs[block] = 1
    return hits + new
