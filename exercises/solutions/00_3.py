def incomplete(data):
    for back, byte in enumerate(reversed(data[-3:]), start=1):
        if 0x80 <= byte <= 0xBF:
            continue  # in the middle of a character: look for its first byte
        length = 2 if 0xC2 <= byte <= 0xDF else 3 if byte >> 4 == 0xE else 1
        if 0xF0 <= byte <= 0xF4:
            length = 4
        return back if back < length else 0
    return 0
