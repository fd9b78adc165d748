"""Answers that look right and are not, with the symptom that each must be told.

Most of them were once in an engine: a name made of the block's own tokens, a full hit that leaves
nothing to compute, a count taken before the hits, a hit that stays in the free queue.
"""

NAMES = """
import hashlib

def block_names(token_ids, block_size, salt=None):
    names, parent = [], {root}
    for start in range(0, {stop}, block_size):
        tokens = token_ids[start : start + block_size]
        {name}
        names.append(name)
        {chain}
    return names
"""
CHAINED = {
    "root": "hashlib.sha256(repr(salt).encode()).digest()",
    "stop": "len(token_ids) // block_size * block_size",
    "name": "name = hashlib.sha256(parent + repr(tokens).encode()).digest()",
    "chain": "parent = name",
}

FIND = """
def find_prefix(token_ids, names, cached, block_size):
    found = []
    for name in {names}:
        if name not in cached:
            {miss}
        found.append(cached[name])
    return found
"""
STOP = {"names": "names[: (len(token_ids) - 1) // block_size]", "miss": "break"}

ADMIT = """
def admit(free, refs, hits, num_blocks):
    num_new = {need}
    if num_new > {room}:
        return None
    {take}
"""
TOUCH = """for block in hits:
        if refs[block] == 0:
            free.remove(block)
        refs[block] += 1
    """
HAND_OUT = """new = [free.pop(0) for _ in range(num_new)]
    for block in new:
        refs[block] = refs.get(block, 0) + 1
    """
FITS = {
    "need": "num_blocks - len(hits)",
    "room": "len(free) - sum(refs[b] == 0 for b in hits)",
    "take": TOUCH + HAND_OUT + "return hits + new",
}

GIVE = """
def give_back(free, refs, table, named):
    for block in {order}:
        {lower}
        if {gone}:
            {queue}
"""
BACK = {
    "order": "reversed(table)",
    "lower": "refs[block] -= 1",
    "gone": "refs[block] == 0",
    "queue": "free.append(block) if block in named else free.insert(0, block)",
}

KEYS = """
def extra_keys(start, end, salt, adapter, images):
    inside = [(digest, position - start) for position, length, digest in images if {inside}]
    return {keys}
"""
APART = {
    "inside": "position < end and position + length > start",
    "keys": '("salt", salt, "adapter", adapter, "images", inside)',
}

WRONG = {
    "05.1": [
        (
            NAMES.format(**CHAINED | {"chain": "pass"}),
            r"share block 1: the name tells nothing of what stands before",
        ),
        (
            NAMES.format(
                **CHAINED
                | {
                    "name": "name = hashlib.sha256(parent + repr(tokens).encode()).digest()",
                    "chain": "parent = bytes(x ^ y for x, y in zip(parent, name))",
                }
            ).replace("sha256(parent + repr", "sha256(repr"),
            r"share block 1",
        ),
        (NAMES.format(**CHAINED | {"stop": "len(token_ids)"}), r"a block that is not full has one"),
        (
            NAMES.format(
                **CHAINED | {"name": "name = hash((parent, tuple(tokens)))", "root": "hash(salt)"}
            ),
            r"a name is int, not bytes",
        ),
        (
            NAMES.format(**CHAINED | {"name": CHAINED["name"].replace("digest()", "digest()[:4]")}),
            r"a name has 4 bytes",
        ),
        (
            NAMES.format(
                **CHAINED
                | {"name": CHAINED["name"].replace("repr(tokens)", "''.join(map(str, tokens))")}
            ),
            r"digits run together",
        ),
        (
            NAMES.format(
                **CHAINED
                | {
                    "name": CHAINED["name"].replace(
                        "repr(tokens).encode()", "bytes(t % 256 for t in tokens)"
                    )
                }
            ),
            r"only a token's low byte",
        ),
        (NAMES.format(**CHAINED | {"root": "b''"}), r"None and 'red' share block 0"),
    ],
    "05.2": [
        (FIND.format(**STOP | {"names": "names"}), r"nothing is left to compute"),
        (FIND.format(**STOP | {"miss": "continue"}), r"blocks behind it are still given"),
        (
            FIND.format(**STOP | {"names": "names[: len(token_ids) // block_size - 1]"}),
            r"computed again for nothing",
        ),
        (
            "def find_prefix(token_ids, names, cached, block_size):\n"
            "    for n in range((len(token_ids) - 1) // block_size, 0, -1):\n"
            "        if names[n - 1] in cached:\n"
            "            return [cached.get(name) for name in names[:n]]\n"
            "    return []",
            r"block 0 is gone",
        ),
        (
            FIND.format(**STOP).replace("cached[name]", "cached.pop(name)"),
            r"a lookup takes nothing",
        ),
    ],
    "05.3": [
        (ADMIT.format(**FITS | {"need": "num_blocks"}), r"counted before the hits"),
        (ADMIT.format(**FITS | {"room": "len(free)"}), r"counted as room for new blocks"),
        (
            ADMIT.format(
                **FITS | {"take": "\n    ".join((HAND_OUT.rstrip(), TOUCH, "return hits + new"))}
            ),
            r"in the table twice|in the middle of it",
        ),
        (
            ADMIT.format(
                **FITS
                | {
                    "take": "for block in hits:\n        refs[block] += 1\n    "
                    "new = [b for b in free if b not in hits][:num_new]\n    "
                    "for block in new:\n        free.remove(block)\n        refs[block] = 1\n    "
                    "return hits + new"
                }
            ),
            r"still in the free queue",
        ),
        (
            ADMIT.format(**FITS | {"take": FITS["take"].replace("refs[block] += 1", "pass")}),
            r"freed too early or never",
        ),
        (
            "def admit(free, refs, hits, num_blocks):\n"
            "    for block in hits:\n"
            "        if refs[block] == 0:\n"
            "            free.remove(block)\n"
            "        refs[block] += 1\n"
            "    if num_blocks - len(hits) > len(free):\n"
            "        return None\n"
            "    new = [free.pop(0) for _ in range(num_blocks - len(hits))]\n"
            "    for block in new:\n"
            "        refs[block] = 1\n"
            "    return hits + new",
            r"something has changed: blocks are lost",
        ),
    ],
    "05.4": [
        (GIVE.format(**BACK | {"order": "table"}), r"the first block is lost before the last"),
        (GIVE.format(**BACK | {"queue": "free.append(block)"}), r"a block without a name waits"),
        (GIVE.format(**BACK | {"queue": "free.insert(0, block)"}), r"used last is lost first"),
        (GIVE.format(**BACK | {"gone": "True"}), r"free while another request reads it"),
        (
            GIVE.format(**BACK | {"lower": "refs[block] = 0"}),
            r"free while another request|count is",
        ),
    ],
    "05.5": [
        (
            KEYS.format(**APART | {"keys": '("adapter", adapter, "images", inside)'}),
            r"different salts share blocks",
        ),
        (
            KEYS.format(**APART | {"keys": '("salt", salt, "images", inside)'}),
            r"different adapters share blocks",
        ),
        (
            KEYS.format(**APART | {"keys": '("salt", salt, "adapter", adapter)'}),
            r"one person's picture is taken for another's",
        ),
        (
            KEYS.format(**APART | {"keys": "(*[key for key in (salt, adapter) if key], *inside)"}),
            r"taken for one another",
        ),
        (KEYS.format(**APART | {"inside": "True"}), r"before the picture is not shared any more"),
        (
            KEYS.format(
                **APART | {"inside": "position < end and position + length > start"}
            ).replace("in images if", "in images[:1] if"),
            r"the second picture is taken for another",
        ),
    ],
}
