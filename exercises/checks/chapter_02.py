"""Graders of chapter 02: slots, pages, the softmax in parts, and the mask of a chunk.

Caches are full of NaN, or of another request's keys, wherever the row has no token; tables are
shuffled and their unused entries point at such blocks. Where an answer is wrong in a way that a
real engine once was, the message names that symptom.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from nanobook.grading import Wrong, chapter_check, grader
from nanobook.oracles import look_back, must_be_tensor, near, random

Tensor = torch.Tensor


# -- 02.1 ---------------------------------------------------------------------------------------


@grader(
    "02.1",
    answer="slot_mapping",
    hints=[
        "A row's new tokens stand at positions seq_len - query_len up to seq_len - 1.",
        "block_table[row, position // block_size] is the block; position % block_size the offset.",
        "Begin with a tensor full of -1, and fill it from the left, one row after another.",
    ],
)
def slots(slot_mapping: Callable[..., Any]) -> None:
    """Slots of a step's new tokens."""
    table = torch.tensor([[7, 2, 5], [4, 9, 0], [1, 8, 3]], dtype=torch.int32)
    for new, lengths, size, room in (
        ([5, 3, 2], [5, 3, 2], 4, 10),  # prompts
        ([1, 1, 1], [6, 4, 9], 4, 3),  # decodes
        ([3, 1, 4], [9, 12, 7], 4, 8),  # a chunk, a decode, a chunk
        ([2, 0, 1], [17, 5, 33], 16, 3),  # a row that is not there
        ([1, 1, 1], [1, 2, 3], 1, 8),  # and padding
        ([2, 2, 0], [4, 2, 0], 4, 6),
    ):
        where = f"{new} new of {lengths} tokens, blocks of {size}"
        ours = slot_mapping(table.clone(), list(new), list(lengths), size, room)
        ours = must_be_tensor("slot_mapping", ours, (room,), torch.int64).tolist()
        right = _slots(table, new, lengths, size)
        count = len(right)
        if ours[:count] != right:
            raise Wrong(f"{_slot_mistake(ours[:count], table, new, lengths, size)} ({where})")
        if any(slot != -1 for slot in ours[count:]):
            raise Wrong(
                f"padding has slots {ours[count:]}: it would be written over other tokens' keys; "
                f"-1 writes nowhere ({where})"
            )


def _slots(
    table: Tensor,
    new: list[int],
    lengths: list[int],
    size: int,
    *,
    shift: int | None = 0,
    row_of: int | None = None,
    stride: bool = True,
    wrap: bool = True,
) -> list[int]:
    """The right slots, and the ways to get them wrong."""
    found = []
    for row, (count, length) in enumerate(zip(new, lengths, strict=True)):
        first = 0 if shift is None else length - count + shift
        for position in range(first, first + count):
            own = table[row if row_of is None else row_of]
            block = int(own[min(position // size, len(own) - 1)])
            base = block * size if stride else block
            found.append(base + (position % size if wrap else position))
    return found


def _slot_mistake(
    ours: list[int], table: Tensor, new: list[int], lengths: list[int], size: int
) -> str:
    def mistaken(**how: Any) -> list[int]:
        return _slots(table, new, lengths, size, **how)

    mistakes = {
        "the past is ignored: a decode overwrites the row's first token": mistaken(shift=None),
        "the slots are one too far: the newest token stands at seq_len - 1": mistaken(shift=1),
        "the slots are one too near: the last token of the past is overwritten": mistaken(shift=-1),
        "every row uses row 0's table: rows overwrite each other's keys": mistaken(row_of=0),
        "a block's number is not its first slot: that is block * block_size": mistaken(
            stride=False
        ),
        "the offset runs on past the block: it is position % block_size": mistaken(wrap=False),
    }
    for message, wrong in mistakes.items():
        if ours == wrong:
            return message
    if -1 in ours:
        return "a new token has slot -1: its key would be lost"
    if len(set(ours)) < len(ours):
        return "two tokens share a slot"
    return f"the slots are {ours}"


# -- 02.2 ---------------------------------------------------------------------------------------


@grader(
    "02.2",
    answer="paged_attention",
    hints=[
        "A row's tokens lie in blocks block_table[row, : ceil(length / block_size)], in order.",
        "kv_cache[:, blocks] is [2, blocks, kv_heads, slots, dim]: bring heads before blocks, then "
        "make one dimension of blocks and slots.",
        "Cut at the row's length before you multiply: a weight of 0 times NaN is NaN.",
        "query[row].view(kv_heads, group, dim) lets the group share its keys.",
    ],
)
def pages(paged_attention: Callable[..., Any]) -> None:
    """Decode attention through a block table."""
    for lengths, heads, kv_heads, size in (
        ([4], 2, 2, 4),
        ([5, 9], 6, 2, 4),
        ([1, 16, 17, 40], 9, 3, 16),
        ([3, 8, 2], 4, 1, 2),
    ):
        for rest in (0.5, torch.nan):
            cache, table, rows = _paged(lengths, kv_heads, size, rest)
            query = random(len(lengths), heads, 16)
            ours = paged_attention(query.clone(), cache.clone(), table.clone(), list(lengths))
            ours = must_be_tensor("paged_attention", ours, query.shape, query.dtype)
            right = torch.cat(
                [look_back(q[None], *row) for q, row in zip(query, rows, strict=True)]
            )
            if not near(ours.nan_to_num(99), right):
                where = f"rows of {lengths} tokens, blocks of {size}"
                raise Wrong(f"{_page_mistake(ours, query, cache, table, lengths, rest)} ({where})")


def _paged(
    lengths: list[int], kv_heads: int, size: int, rest: float
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(cache, block table, rows): rows at random places of a cache that is full of `rest`."""
    rng = torch.Generator().manual_seed(sum(lengths))
    counts = [-(-length // size) for length in lengths]
    order = torch.randperm(sum(counts) + 4, generator=rng)
    cache = torch.full((2, len(order), kv_heads, size, 16), rest)
    if rest == rest:
        cache = random(*cache.shape, seed=3)  # what other requests have left there
    table = torch.full((len(lengths), max(counts) + 1), int(order[-1]), dtype=torch.int32)
    rows, given = [], 0
    for i, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        own = order[given : given + count]
        given += count
        table[i, :count] = own.int()
        row = random(2, length, kv_heads, 16, seed=i)
        for position in range(length):
            cache[:, own[position // size], :, position % size] = row[:, position]
        rows.append(row)
    return cache, table, rows


def _page_mistake(
    ours: Tensor, query: Tensor, cache: Tensor, table: Tensor, lengths: list[int], rest: float
) -> str:
    _, _, kv_heads, size, dim = cache.shape

    def read(
        own: Tensor, length: int, *, shuffled: bool = False, all_slots: bool = False
    ) -> Tensor:
        count = -(-length // size)
        part = cache[:, own[:count].long()]
        part = part if shuffled else part.transpose(2, 3)
        flat = part.reshape(2, count * size, kv_heads, dim)
        return flat if all_slots else flat[:, :length]

    def mistaken(tables: Tensor, longer: int = 0, **how: Any) -> Tensor:
        rows = [
            read(own, max(1, length + longer), **how)
            for own, length in zip(tables, lengths, strict=True)
        ]
        return torch.cat([look_back(q[None], *row) for q, row in zip(query, rows, strict=True)])

    contiguous = torch.arange(table.shape[1]).repeat(len(lengths), 1)
    mistakes = {
        "the table is not read: blocks 0, 1, 2 belong to somebody else": contiguous,
        "a row attends to the keys of another row: every row has its own table": table[:1].expand(
            len(lengths), -1
        ),
    }
    for message, wrong in mistakes.items():
        if near(ours.nan_to_num(99), mistaken(wrong).nan_to_num(99)):
            return message
    if max(lengths) > 1 and near(ours.nan_to_num(99), mistaken(table, -1).nan_to_num(99)):
        return "the newest token's own key is not seen: the length is one too short"
    if near(ours.nan_to_num(99), mistaken(table, shuffled=True).nan_to_num(99)):
        return (
            "slots and heads are mixed up: a block is [kv_heads, slots, dim]; move the heads out "
            "of the way before blocks and slots become one dimension"
        )
    if near(ours.nan_to_num(99), mistaken(table, all_slots=True).nan_to_num(99)):
        return "the last block is read to its end: what follows the row's last token is not its own"
    if rest != rest and ours.isnan().any():
        return (
            "NaN: a slot that no token owns was read; hiding its score is not enough, because a "
            "weight of 0 times NaN is NaN"
        )
    return "the result is not softmax(q kᵀ / sqrt(dim)) v over the row's tokens"


# -- 02.3 ---------------------------------------------------------------------------------------


@grader(
    "02.3",
    answer="online_softmax",
    hints=[
        "new_top = max(top, scores.max()); weights = exp(scores - new_top).",
        "shrink = exp(top - new_top) brings both the sum and the numerator to the new scale.",
        "Nothing seen yet: top is -inf, and -inf - -inf is NaN. Subtract 0 there instead.",
        "The log-sum-exp is top + log(sum).",
    ],
)
def online(online_softmax: Callable[..., Any]) -> None:
    """A softmax in one walk."""
    hidden = -torch.inf
    cases = {
        "one tile": [random(5)],
        "tiles with ever smaller scores": [random(4) + 9, random(4), random(3) - 9],
        "tiles with ever larger scores": [random(4), random(4) + 6, random(3) + 12],
        "large scores": [random(4) * 90, random(7, seed=1) * 90],
        "some keys hidden": [torch.tensor([0.3, hidden, 1.2]), torch.tensor([hidden, 0.1])],
        "a hidden tile last": [random(4), torch.full((4,), hidden)],
        "a hidden tile first": [torch.full((4,), hidden), random(4)],
    }
    for name, scores in cases.items():
        values = [random(len(tile), 6, seed=i) for i, tile in enumerate(scores)]
        out, lse = _two(online_softmax(iter(list(zip(scores, values, strict=True)))))
        all_scores, all_values = torch.cat(scores).double(), torch.cat(values).double()
        right = all_scores.softmax(0) @ all_values
        must_be_tensor("the mean", out, right.shape, torch.float32)
        if not near(out.nan_to_num(1e6), right):
            raise Wrong(f"{name}: {_online_mistake(out, scores, values)}")
        if not near(torch.as_tensor(lse).nan_to_num(1e6), torch.logsumexp(all_scores, 0)):
            raise Wrong(f"{name}: {_lse_mistake(torch.as_tensor(lse), scores)}")
    tiles = [(torch.full((3,), hidden), random(3, 6))] * 2
    out, lse = _two(online_softmax(iter(tiles)))
    if not (out == 0).all() or lse != hidden:
        raise Wrong("no key was seen: the mean must be zeros and the log-sum-exp -inf, never NaN")


def _two(answer: Any) -> tuple[Any, Any]:
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise Wrong("it must return two things: the output and the log-sum-exp")
    return answer


def _online_mistake(out: Tensor, scores: list[Tensor], values: list[Tensor]) -> str:
    if out.isnan().any():
        if any((tile == -torch.inf).all() for tile in scores):
            return "NaN: a tile in which nothing is seen gives -inf - -inf"
        return "NaN: exp overflows; subtract the largest score so far"
    for message, (keep_acc, keep_total) in {
        "the numerator is not brought to the new scale when a larger score turns up": (True, False),
        "the sum is not brought to the new scale when a larger score turns up": (False, True),
        "nothing is brought to the new scale when a larger score turns up": (True, True),
    }.items():
        top, total = torch.tensor(-torch.inf), torch.tensor(0.0)
        acc = torch.zeros(values[0].shape[1])
        for tile, value in zip(scores, values, strict=True):
            new_top = torch.maximum(top, tile.max())
            shrink = torch.tensor(1.0) if top == -torch.inf else (top - new_top).exp()
            weights = (tile - new_top).exp()
            total = total * (1.0 if keep_total else shrink) + weights.sum()
            acc = acc * (1.0 if keep_acc else shrink) + weights @ value
            top = new_top
        if near(out, acc / total):
            return message
    last = scores[-1].softmax(0) @ values[-1]
    if near(out, last):
        return "only the last tile counts: what came before is forgotten"
    means = [s.softmax(0) @ v for s, v in zip(scores, values, strict=True)]
    if near(out, torch.stack(means).mean(0)):
        return "the tiles' means are averaged as if all tiles weighed the same"
    return "the result is not the softmax's mean"


def _lse_mistake(lse: Tensor, scores: list[Tensor]) -> str:
    flat = torch.cat(scores)
    if near(lse, flat.max()):
        return "that is the largest score, not the log-sum-exp"
    if near(lse, (flat - flat.max()).exp().sum().log()):
        return "the log of the sum lacks the largest score that was subtracted from all"
    return f"the log-sum-exp is {float(lse):.3f}, and should be {torch.logsumexp(flat, 0):.3f}"


# -- 02.4 ---------------------------------------------------------------------------------------


@grader(
    "02.4",
    answer="merge",
    hints=[
        "exp(lse) is the weight of a whole part; the new LSE is the logsumexp of the parts'.",
        "weights = exp(lses - lse): they add up to 1.",
        "Where all parts are empty, lse is -inf: subtract 0 there instead.",
        "torch.where(weights > 0, outs, 0) keeps what an empty part holds out of the sum.",
    ],
)
def merging(merge: Callable[..., Any]) -> None:
    """Parts of a softmax put together."""
    for name, sizes, scale in (
        ("two parts", [5, 5], 1.0),
        ("parts of different size", [1, 20, 4], 1.0),
        ("a single part", [6], 1.0),
        ("large scores", [4, 4, 4], 90.0),
        ("an empty part", [5, 0, 3], 1.0),
    ):
        scores = random(sum(sizes), 3) * scale
        values = random(sum(sizes), 3, 8)
        outs, lses = _parts(scores, values, sizes)
        out, lse = _two(merge(outs.clone(), lses.clone()))
        weights = scores.double().softmax(0)
        right = torch.einsum("th,thd->hd", weights, values.double())
        must_be_tensor("the merged output", out, right.shape, torch.float32)
        must_be_tensor("the merged log-sum-exp", lse, lses.shape[1:], torch.float32)
        if not near(out.nan_to_num(1e6), right):
            raise Wrong(f"{name}: {_merge_mistake(out, outs, lses)}")
        if not near(lse.nan_to_num(1e6), torch.logsumexp(scores.double(), 0)):
            raise Wrong(
                f"{name}: the output is right, but its log-sum-exp is not: the next merge would "
                "weigh it wrongly"
            )
    outs, lses = _parts(random(4, 3), random(4, 3, 8), [4, 0])
    out, lse = _two(merge(outs[1:].repeat(2, 1, 1), lses[1:].repeat(2, 1)))
    if not (out == 0).all() or not (lse == -torch.inf).all():
        raise Wrong("two empty parts make an empty one: zeros and -inf, not NaN")


def _parts(scores: Tensor, values: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor]:
    outs, lses = [], []
    for s, v in zip(scores.split(sizes), values.split(sizes), strict=True):
        empty = torch.full(values.shape[1:], torch.nan)
        outs.append(torch.einsum("th,thd->hd", s.softmax(0), v) if len(s) else empty)
        lses.append(torch.logsumexp(s, 0) if len(s) else torch.full(s.shape[1:], -torch.inf))
    return torch.stack(outs), torch.stack(lses)


def _merge_mistake(out: Tensor, outs: Tensor, lses: Tensor) -> str:
    seen = torch.where(lses[..., None] > -torch.inf, outs, 0.0)
    if out.isnan().any():
        if (lses == -torch.inf).any():
            return "NaN: an empty part's output was multiplied by 0, and 0 times NaN is NaN"
        return "NaN: exp(lse) overflows; subtract the largest, or the merged LSE, first"
    mistakes = {
        "the plain mean of the parts: a part of many keys must weigh more": seen.mean(0),
        "the weights do not add up to 1: divide by the sum of exp(lse)": (
            lses.exp()[..., None] * seen
        ).sum(0),
        "the weights are the LSEs themselves: they are logarithms": (
            torch.where(lses > -torch.inf, lses, 0.0)[..., None] * seen
        ).sum(0)
        / torch.where(lses > -torch.inf, lses, 0.0).sum(0)[..., None],
        "the part with the largest LSE is taken alone": seen.gather(
            0, lses.argmax(0)[None, :, None].expand(1, -1, seen.shape[2])
        )[0],
    }
    for message, wrong in mistakes.items():
        if near(out, wrong.nan_to_num(1e6)):
            return message
    return "the result is not the mean over the union of the keys"


# -- 02.5 ---------------------------------------------------------------------------------------


@grader(
    "02.5",
    answer="key_bounds",
    hints=[
        "Query j of the chunk stands at position past + j and sees the keys up to there.",
        "The tile's last query is min((index + 1) * tile_queries, num_new) - 1: end is one behind "
        "its position.",
        "The tile's first query sees past + index * tile_queries + 1 keys; every one of the tile "
        "sees these.",
        "Round that down to whole tiles of keys.",
    ],
)
def bounds(key_bounds: Callable[..., Any]) -> None:
    """How far a tile of queries reads, and from where it needs a mask."""
    for past, num_new, tile_queries, tile_keys in (
        (0, 32, 16, 16),
        (0, 20, 16, 8),
        (48, 16, 16, 16),
        (37, 50, 16, 32),
        (100, 1, 16, 16),
        (15, 3, 2, 16),
        (5, 40, 8, 64),
    ):
        for index in range(-(-num_new // tile_queries)):
            answer = key_bounds(past, num_new, index, tile_queries, tile_keys)
            if not isinstance(answer, tuple) or len(answer) != 2:
                raise Wrong("it must return two numbers: every, end")
            where = f"tile {index} of {num_new} new tokens after {past}"
            _grade_bounds(where, answer, past, num_new, index, tile_queries, tile_keys)


def _grade_bounds(
    where: str,
    answer: tuple[int, int],
    past: int,
    num_new: int,
    index: int,
    queries: int,
    keys: int,
) -> None:
    every, end = answer
    first, last = index * queries, min((index + 1) * queries, num_new) - 1
    if end > past + num_new:
        raise Wrong(
            f"{where}: keys up to {end} are read, but the row has only {past + num_new} tokens: "
            "what follows is another row's, or NaN"
        )
    if end < past + last + 1:
        if end == last + 1:
            raise Wrong(
                f"{where}: the past is forgotten: only keys up to {end} are read, the beginning of "
                "the prompt"
            )
        raise Wrong(f"{where}: query {last} stands at {past + last} and does not see its own key")
    if end > past + last + 1:
        raise Wrong(f"{where}: keys that no query of the tile sees are read, up to {end}")
    if every % keys:
        raise Wrong(
            f"{where}: the masked walk begins at {every}, which is no multiple of {keys}: the "
            "tiles before it would overlap it"
        )
    if every > past + first + 1:
        raise Wrong(
            f"{where}: tokens see the future: query {first} stands at {past + first}, and keys up "
            f"to {every} go without a mask"
        )
    if every != (past + first + 1) // keys * keys:
        raise Wrong(
            f"{where}: right, but slow: only keys [0, {every}) go without a mask; each query of "
            f"the tile sees the first {past + first + 1}"
        )


# -- the chapter --------------------------------------------------------------------------------


@chapter_check(2)
def chapter() -> None:
    """The learner's backends and kernels against float64, over scattered pages full of NaN."""
    from nanoserve.attention.torch_paged import TorchPagedBackend

    torch.set_grad_enabled(False)
    _check_backend("the torch backend", TorchPagedBackend(), "cpu")
    from nanokernels.runtime import INTERPRET, KernelUnavailableError, require_triton

    try:
        require_triton()
    except KernelUnavailableError:
        return
    from nanoserve.attention.triton_paged import TritonPagedBackend

    device = "cpu" if INTERPRET else "cuda"
    _check_backend("the Triton backend", TritonPagedBackend(), device)
    _check_kernels(device)


def _check_backend(name: str, backend: Any, device: str) -> None:
    from nanoserve.forward import AttentionShape

    shape = AttentionShape(6, 2, 16, 16**-0.5)
    for what, past, new in _steps():
        cache, table, rows = _paged(
            [p + n for p, n in zip(past, new, strict=True)], 2, 16, torch.nan
        )
        metadata = _metadata(table, past, new, device)
        slots = metadata.slot_mapping[: sum(new)].cpu()
        cache[:, slots // 16, :, slots % 16] = torch.nan  # the backend has to write these itself
        query = random(sum(new) + 2, 6, 16)
        fresh = [row[:, -n:] for row, n in zip(rows, new, strict=True)]
        key, value = torch.cat([*fresh, random(2, 2, 2, 16)], 1)
        backend.prepare(metadata)
        tensors = (tensor.to(device) for tensor in (query, key, value, cache))
        ours = backend.forward(*tensors, shape, metadata).cpu()[: sum(new)]
        split = query[: sum(new)].split(new)
        right = torch.cat([look_back(q, *row) for q, row in zip(split, rows, strict=True)])
        if ours.isnan().any():
            raise Wrong(f"{name}: NaN in {what}: a slot is read that no token owns, or not written")
        if not near(ours, right, 1e-4):
            raise Wrong(f"{name}: {what} is not dense attention")


def _steps() -> Iterator[tuple[str, list[int], list[int]]]:
    yield "a step of decodes", [15, 16, 40], [1, 1, 1]
    yield "a step of prompts", [0, 0], [20, 3]
    yield "a step with chunks", [17, 5], [9, 30]
    yield "a mixed step", [30, 0, 20], [1, 18, 5]


def _metadata(table: Tensor, past: list[int], new: list[int], device: str) -> Any:
    from nanoserve.forward import AttentionMetadata

    lengths = [p + n for p, n in zip(past, new, strict=True)]
    right = _slots(table, new, lengths, 16)
    return AttentionMetadata(
        query_start_loc=torch.tensor([0, *new], device=device).cumsum(0).int(),
        seq_lens=torch.tensor(lengths, dtype=torch.int32, device=device),
        block_table=table.to(device),
        slot_mapping=torch.tensor([*right, -1, -1], device=device),
        block_size=16,
        query_lens=new,
        seq_lens_cpu=lengths,
    )


def _check_kernels(device: str) -> None:
    """What the backend's steps do not reach: splits, and the merge of two results."""
    from nanokernels.decode_plan import plan_decode
    from nanokernels.merge import merge_lse
    from nanokernels.paged_decode import paged_decode

    lengths = [300, 7]
    cache, table, rows = _paged(lengths, 2, 16, torch.nan)
    query = random(2, 6, 16)
    plan = plan_decode(lengths, 2, torch.device(device), 1, split=64)
    seq_lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    args = (query.to(device), cache.to(device), table.to(device), seq_lens, 0.25)
    out, _ = paged_decode(*args, plan=plan)
    right = torch.cat([look_back(q[None], *row) for q, row in zip(query, rows, strict=True)])
    if not near(out.cpu(), right, 1e-4):
        raise Wrong("paged_decode: a row in several splits is not the row in one")
    scores, values = random(9, 3), random(9, 3, 16)
    outs, lses = (part.to(device) for part in _parts(scores, values, [5, 4]))
    merged, _ = merge_lse(outs[:1], lses[:1], outs[1:], lses[1:])
    whole = torch.einsum("th,thd->hd", scores.double().softmax(0), values.double())
    if not near(merged[0].cpu(), whole, 1e-4):
        raise Wrong("merge_lse: two parts merged are not the whole softmax")
