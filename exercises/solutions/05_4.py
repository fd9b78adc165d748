def give_back(free, refs, table, named):
    for block in reversed(table):
        refs[block] -= 1
        if refs[block] == 0:
            if block in named:
                free.append(block)
            else:
                free.insert(0, block)
