"""Graders of chapter 05: names of blocks, what is found under them, and who goes first.

An answer is judged by what it does to a cache, not by the bytes that it hashes: two rows are named,
and the message says which of them would have been handed the other's keys and values.
"""

import hashlib
import random
import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from nanobook.grading import Wrong, chapter_check, grader

Names = Sequence[Any]


# -- 05.1 ---------------------------------------------------------------------------------------


@grader(
    "05.1",
    answer="block_names",
    hints=[
        "Only full blocks: len(token_ids) // block_size names.",
        "Keep `parent`, the name of the block before; the first one is made of the salt.",
        "A block's name is sha256(parent + its tokens), and then the next block's parent.",
        "Write tokens so that no two lists look alike: repr([1, 23]) differs from repr([12, 3]).",
    ],
)
def names(block_names: Callable[..., Any]) -> None:
    """A chain of hashes over full blocks, with the salt at its root."""
    rng = random.Random(0)
    row = [rng.randrange(50000) for _ in range(67)]
    ours = _named(block_names, row, 16)
    if ours != _named(block_names, list(row), 16):
        raise Wrong("the same row gets other names the second time: nothing would ever be found")
    _grade_chain(block_names, row)
    _grade_depth(block_names)
    _grade_encoding(block_names)
    _grade_salt(block_names, row)


def _named(block_names: Callable[..., Any], row: list[int], size: int, salt: Any = None) -> Names:
    answer = block_names(row, size, salt)
    if not isinstance(answer, list):
        raise Wrong(f"block_names gives {type(answer).__name__}, not a list")
    full = len(row) // size
    if len(answer) > full:
        raise Wrong(
            f"{len(row)} tokens fill {full} blocks of {size}, and there are {len(answer)} names: a "
            "block that is not full has one, and will hold other tokens a step later"
        )
    if len(answer) < full:
        raise Wrong(
            f"{len(row)} tokens fill {full} blocks of {size}: {len(answer)} names are there"
        )
    for name in answer:
        if not isinstance(name, bytes):
            raise Wrong(
                f"a name is {type(name).__name__}, not bytes: hash() and its kind were not made "
                "against people who look for two prompts with one name; hashlib's were"
            )
        if len(name) < 16:
            raise Wrong(
                f"a name has {len(name)} bytes: whoever tries {2 ** (4 * len(name)):,} prompts or "
                "so finds two with one name, and reads another's cache"
            )
    return answer


def _grade_chain(block_names: Callable[..., Any], row: list[int]) -> None:
    ours = _named(block_names, row, 16)
    other = [row[0] + 1, *row[1:]]  # only the first token differs
    theirs = _named(block_names, other, 16)
    if ours[0] == theirs[0]:
        raise Wrong("rows that differ in their first token have the same first name")
    for depth in range(1, 4):
        if ours[depth] == theirs[depth]:
            raise Wrong(
                f"two prompts with different first blocks share block {depth}: the name tells "
                "nothing of what stands before, so keys that have seen another text are found"
            )
    if _named(block_names, row[:40] + [1] * 30, 16)[:2] != ours[:2]:
        raise Wrong("a block's name changes with what follows: no two prompts would share anything")


def _grade_depth(block_names: Callable[..., Any]) -> None:
    same = _named(block_names, [5, 6, 7, 8] * 4, 4)
    if len(set(same)) < len(same):
        raise Wrong(
            "four blocks of the same tokens share a name: a block is found at another depth, with "
            "keys turned by other positions"
        )
    a, b = [1, 1, 1, 1], [2, 2, 2, 2]
    if _named(block_names, a + b, 4)[1] == _named(block_names, b + a, 4)[1]:
        raise Wrong("blocks a, b and blocks b, a end in the same name: the order is lost")


def _grade_encoding(block_names: Callable[..., Any]) -> None:
    for one, two, what in (
        ([1, 2, 3, 4], [4, 3, 2, 1], "the order of the tokens is lost"),
        ([1, 23, 4, 5], [12, 3, 4, 5], "digits run together, with nothing between the tokens"),
        ([1, 2, 3, 4], [257, 2, 3, 4], "only a token's low byte is hashed"),
        ([1, 2, 3, 4], [65537, 2, 3, 4], "only a token's low 16 bits are hashed"),
    ):
        if _named(block_names, one, 4) == _named(block_names, two, 4):
            raise Wrong(f"{one} and {two} have the same name: {what}")


def _grade_salt(block_names: Callable[..., Any], row: list[int]) -> None:
    by_salt = {salt: _named(block_names, row, 16, salt) for salt in (None, "red", "blue")}
    if by_salt["red"] != _named(block_names, row, 16, "red"):
        raise Wrong("two requests with the same salt get different names: they may share")
    for one, two in ((None, "red"), ("red", "blue")):
        if shared := [i for i, (x, y) in enumerate(zip(by_salt[one], by_salt[two])) if x == y]:
            raise Wrong(
                f"salts {one!r} and {two!r} share block {shared[0]}: a stranger learns from the "
                "time of the answer that this prompt has been here before"
            )


# -- 05.2 ---------------------------------------------------------------------------------------


@grader(
    "05.2",
    answer="find_prefix",
    hints=[
        "Go from the left and stop at the first name that is not cached.",
        "At most len(token_ids) - 1 tokens may be found, in whole blocks.",
        "names[: (len(token_ids) - 1) // block_size] are the ones to look at.",
    ],
)
def prefix(find_prefix: Callable[..., Any]) -> None:
    """The longest run of cached blocks from the left that leaves a token to compute."""
    size = 4
    for num_tokens in (1, 3, 4, 5, 8, 11, 12, 13, 16):
        row = list(range(num_tokens))
        names = [f"n{i}".encode() for i in range(num_tokens // size)]
        for gone in (set(), {0}, {1}, {2}, {len(names) - 1}, set(range(len(names)))):
            cached = {name: 10 + i for i, name in enumerate(names) if i not in gone}
            _grade_found(find_prefix, row, names, cached, size)
    deeper = [f"n{i}".encode() for i in range(4)]
    _grade_found(find_prefix, list(range(9)), deeper[:2], dict.fromkeys(deeper, 7), size)


def _grade_found(
    find_prefix: Callable[..., Any],
    row: list[int],
    names: list[bytes],
    cached: dict[bytes, int],
    size: int,
) -> None:
    run = 0
    while run < len(names) and names[run] in cached:
        run += 1
    right = [cached[name] for name in names[: min(run, (len(row) - 1) // size)]]
    before = dict(cached)
    answer = find_prefix(row, names, cached, size)
    where = f"{len(row)} tokens in blocks of {size}, cached: {[n in cached for n in names]}"
    if cached != before:
        raise Wrong("`cached` has changed: a lookup takes nothing and forgets nothing")
    if not isinstance(answer, list):
        raise Wrong(f"find_prefix gives {type(answer).__name__}, not a list")
    if answer == right:
        return
    if len(answer) * size >= len(row):
        raise Wrong(
            f"all {len(row)} tokens are found: nothing is left to compute, the step has a query of "
            f"length zero and no logits come out of it ({where})"
        )
    if None in answer or len(answer) > run:
        raise Wrong(
            f"block {run} is gone, and blocks behind it are still given: the request would read "
            f"its tokens at the wrong places ({where})"
        )
    if answer == right[: len(answer)]:
        raise Wrong(
            f"{len(answer)} blocks are found where {len(right)} could be: a block is computed "
            f"again for nothing ({where})"
        )
    raise Wrong(f"blocks {answer} are given, not {right} ({where})")


# -- 05.3 ---------------------------------------------------------------------------------------


@grader(
    "05.3",
    answer="admit",
    hints=[
        "New blocks needed: num_blocks - len(hits).",
        "A hit with no users lies in the free queue: once it is taken, it is not free any more.",
        "Decide; take the hits (out of the queue, one user more); then hand out the rest.",
    ],
)
def admission(admit: Callable[..., Any]) -> None:
    """Hits first, then new blocks, all or nothing."""
    for free, used, hits, num_blocks in (
        ([1, 2, 3, 4], {}, [], 3),
        ([1, 2, 3, 4], {9: 1}, [9], 3),
        ([1, 2], {8: 1, 9: 2}, [8, 9], 4),
        ([1, 2, 3], {}, [2], 3),
        ([1, 2, 3], {}, [1, 2], 3),
        ([1, 2, 3, 4], {9: 1}, [9, 3], 4),
        ([1, 2, 3], {}, [3], 4),
        ([1, 2], {9: 1}, [9, 2], 4),
        ([1], {9: 1}, [9], 4),
        ([1, 2], {}, [1, 2], 2),
        ([], {8: 1, 9: 1}, [8, 9], 2),
    ):
        _grade_admission(admit, free, used, hits, num_blocks)


def _grade_admission(
    admit: Callable[..., Any],
    free: list[int],
    used: dict[int, int],
    hits: list[int],
    num_blocks: int,
) -> None:
    refs = dict.fromkeys(free, 0) | used
    where = f"free {free}, in use {sorted(used)}, hits {hits}, {num_blocks} blocks wanted"
    rest = [block for block in free if block not in hits]
    num_new = num_blocks - len(hits)
    our_free, our_refs = list(free), dict(refs)
    try:
        table = admit(our_free, our_refs, list(hits), num_blocks)
    except (IndexError, ValueError) as error:
        raise Wrong(
            f"{type(error).__name__} in the middle of it: hits in the free queue were counted as "
            f"room for new blocks ({where})"
        ) from error
    if num_new > len(rest):
        if table is not None:
            raise Wrong(
                f"it does not fit, and the table {table} is given: a hit that is free was counted "
                f"twice, as a hit and as room ({where})"
            )
        if (our_free, our_refs) != (free, refs):
            raise Wrong(f"it does not fit, but something has changed: blocks are lost ({where})")
        return
    if table is None:
        raise Wrong(
            f"refused, though it fits: what was found need not be allocated again, count after the "
            f"hits ({where})"
        )
    _grade_table(table, hits, num_blocks, where)
    if still := [block for block in table if block in our_free]:
        raise Wrong(
            f"block {still[0]} is in the table and still in the free queue: the next request is "
            f"handed it too, and overwrites it ({where})"
        )
    for block in table:
        users = refs[block] + 1
        if our_refs[block] != users:
            raise Wrong(
                f"block {block} has {users} users now, and its count says {our_refs[block]}: it "
                f"is freed too early or never ({where})"
            )
    if table != hits + rest[:num_new] or our_free != rest[num_new:]:
        raise Wrong(f"new blocks come from the front of the queue, in order ({where}): {table}")


def _grade_table(table: list[int], hits: list[int], num_blocks: int, where: str) -> None:
    if len(set(table)) < len(table):
        twice = next(block for block in table if table.count(block) > 1)
        raise Wrong(
            f"block {twice} is in the table twice: it was handed out as new before it was taken as "
            f"a hit, and the request overwrites its own prefix ({where})"
        )
    if len(table) != num_blocks:
        raise Wrong(
            f"the table has {len(table)} blocks, not {num_blocks}: the number was counted before "
            f"the hits ({where})"
        )
    if table[: len(hits)] != hits:
        raise Wrong(f"the table {table} does not begin with the hits ({where})")


# -- 05.4 ---------------------------------------------------------------------------------------


@grader(
    "05.4",
    answer="give_back",
    hints=[
        "Lower every block's count; only those that come to 0 go into the queue.",
        "Blocks without a name go to the front, named ones to the back.",
        "The queue's front is lost first: put the table's last block in before its first.",
    ],
)
def order(give_back: Callable[..., Any]) -> None:
    """The queue's order is the order of eviction."""
    for free, table, shared, unnamed in (
        ([20, 21], [1, 2, 3], {}, set()),
        ([20, 21], [1, 2, 3], {}, {3}),
        ([20, 21], [4, 1, 7, 2], {4: 2, 1: 1}, {2}),
        ([], [5, 6, 7], {5: 1}, {7}),
        ([20], [3, 9], {}, {3, 9}),
    ):
        _grade_order(give_back, free, table, shared, unnamed)


def _grade_order(
    give_back: Callable[..., Any],
    free: list[int],
    table: list[int],
    shared: dict[int, int],
    unnamed: set[int],
) -> None:
    refs = dict.fromkeys(free, 0) | {block: 1 + shared.get(block, 0) for block in table}
    named = {block for block in table if block not in unnamed} | set(free)
    where = (
        f"queue {free}, table {table}, shared {sorted(shared)}, without a name {sorted(unnamed)}"
    )
    ours, our_refs = list(free), dict(refs)
    give_back(ours, our_refs, list(table), set(named))
    for block in table:
        if block in shared and block in ours:
            raise Wrong(
                f"block {block} is free while another request reads it: it will be handed out and "
                f"overwritten ({where})"
            )
        if our_refs[block] != refs[block] - 1:
            raise Wrong(f"block {block}'s count is {our_refs[block]} ({where})")
    gone = [block for block in table if block not in shared]
    if lost := [block for block in gone if ours.count(block) != 1]:
        raise Wrong(f"block {lost[0]} is {ours.count(lost[0])} times in the queue ({where})")
    worthless = [block for block in gone if block in unnamed]
    kept = [block for block in reversed(gone) if block not in unnamed]
    if ours[len(worthless) :] == free + kept and set(ours[: len(worthless)]) == set(worthless):
        return
    if worthless and set(ours[: len(worthless)]) != set(worthless):
        raise Wrong(
            f"the queue is {ours}: a block without a name waits while blocks that could still be "
            f"found are lost ({where})"
        )
    rest = ours[len(worthless) :]
    if free and rest[: len(free)] != free:
        raise Wrong(
            f"the queue is {ours}: what was used last is lost first, before {free}, which nobody "
            f"has asked for in a while ({where})"
        )
    raise Wrong(
        f"the queue is {ours}: the first block is lost before the last. A prefix is found from the "
        f"left, so with its first block all others are lost ({where})"
    )


# -- 05.5 ---------------------------------------------------------------------------------------

SYSTEM, PLACEHOLDER = list(range(100, 108)), 9
SIZE = 4


@grader(
    "05.5",
    answer="extra_keys",
    hints=[
        "The name of the block before is hashed too: what is in the first block is in all.",
        "Say of each key what it is: a salt 'x' and an adapter 'x' must not look alike.",
        "An image is in the block if position < end and position + length > start.",
        "An image's key in its first block is enough to keep all later ones apart.",
    ],
)
def keys(extra_keys: Callable[..., Any]) -> None:
    """Salt, adapter and images keep blocks apart, and nothing else does."""
    row = SYSTEM + [PLACEHOLDER] * 6 + list(range(200, 206))
    plain: dict[str, Any] = {"salt": None, "adapter": None, "images": []}
    cat, dog = [(8, 6, "cat")], [(8, 6, "dog")]
    twice = [*SYSTEM[:4], *[PLACEHOLDER] * 4, *SYSTEM, *[PLACEHOLDER] * 4, 7, 7, 7, 7]
    for tokens, one, two, right, message in (
        (row, {}, {}, 5, "two equal requests share nothing"),
        (row, {"salt": "a"}, {"salt": "a"}, 5, "two requests with the same salt do not share"),
        (
            row,
            {"salt": "a"},
            {"salt": "b"},
            0,
            "requests with different salts share blocks: a stranger can find out what was asked",
        ),
        (
            row,
            {"salt": "a"},
            {},
            0,
            "a request without a salt finds the blocks of one that has one",
        ),
        (
            row,
            {"adapter": "poet"},
            {"adapter": "lawyer"},
            0,
            "requests under different adapters share blocks: keys made with other weights are read",
        ),
        (row, {"adapter": "poet"}, {}, 0, "the base model finds blocks made under an adapter"),
        (
            row,
            {"salt": "x"},
            {"adapter": "x"},
            0,
            "a salt and an adapter of the same spelling are taken for one another",
        ),
        (
            row,
            {"images": cat},
            {"images": dog},
            2,
            "one person's picture is taken for another's: placeholders look alike, pixels do not",
        ),
        (row, {"images": cat}, {"images": cat}, 5, "the same picture is not found again"),
        (
            twice,
            {"images": [(4, 4, "cat"), (16, 4, "dog")]},
            {"images": [(4, 4, "cat"), (16, 4, "owl")]},
            4,
            "the second picture is taken for another",
        ),
    ):
        shared = _num_shared(extra_keys, tokens, plain | one, plain | two)
        if shared > right:
            raise Wrong(f"{message} ({one} and {two} share {shared} blocks, not {right})")
        if shared < right:
            why = message
            if right not in (0, len(tokens) // SIZE):
                why = "text that stands before the picture is not shared any more"
            raise Wrong(f"{why} ({one} and {two} share {shared} blocks, not {right})")


def _num_shared(
    extra_keys: Callable[..., Any], row: list[int], one: dict[str, Any], two: dict[str, Any]
) -> int:
    """How many blocks of the same row two requests have in common."""
    chains = []
    for request in (one, two):
        chain, parent = [], b""
        for start in range(0, len(row) // SIZE * SIZE, SIZE):
            extra = extra_keys(start, start + SIZE, **request)
            if not isinstance(extra, tuple):
                raise Wrong(f"extra_keys gives {type(extra).__name__}, not a tuple")
            text = repr((row[start : start + SIZE], extra)).encode()
            parent = hashlib.sha256(parent + text).digest()
            chain.append(parent)
        chains.append(chain)
    return sum(x == y for x, y in zip(*chains, strict=True))


# -- the chapter --------------------------------------------------------------------------------


@chapter_check(5)
def cache() -> None:
    """The prefix index that the learner's cells have built; see built_05.py beside this file."""
    runpy.run_path(str(Path(__file__).with_name("built_05.py")))["check"]()
