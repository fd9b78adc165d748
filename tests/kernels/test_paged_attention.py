"""The paged attention kernels against dense attention in float64.

Here they run in Triton's interpreter, over shapes chosen so that every pair of options meets; on a
GPU they run compiled, over the full product and in bf16.
"""

import itertools
import math

import pytest
import torch
from nanofixtures.paged import Case, error
from nanokernels.runtime import INTERPRET, KernelUnavailableError, require_triton

try:
    require_triton()
except KernelUnavailableError as reason:
    pytest.skip(f"no kernels here: {reason}", allow_module_level=True)

from nanokernels import decode_plan
from nanokernels.decode_plan import cut, plan_decode
from nanokernels.kv_gather import kv_gather
from nanokernels.kv_write import kv_write
from nanokernels.merge import merge_lse
from nanokernels.paged_decode import paged_decode
from nanokernels.paged_prefill import paged_prefill

DEVICE = "cpu" if INTERPRET else "cuda"
LIMIT = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
HEADS = [(4, 4), (4, 2), (6, 2), (8, 1), (15, 5), (16, 1)]


def decode(case, **options):
    return paged_decode(
        case.query,
        case.cache,
        case.table,
        case.seq_lens,
        case.scale,
        sliding_window=case.window,
        soft_cap=case.soft_cap,
        sinks=case.sink_logits,
        **options,
    )


def prefill(case, **options):
    return paged_prefill(
        case.query,
        case.cache,
        case.table,
        case.query_start,
        case.seq_lens,
        case.scale,
        query_lens=case.query_lens,
        lengths=case.lengths,
        sliding_window=case.window,
        soft_cap=case.soft_cap,
        sinks=case.sink_logits,
        **options,
    )


def check(case, found):
    out, lse = case.expected()
    assert error(found[0], out) < LIMIT[case.dtype]
    assert error(found[1], lse) < LIMIT[case.dtype]


def pairwise(options, seed=0):
    """Few combinations in which every pair of values of any two options occurs (greedy)."""
    names = list(options)
    generator = torch.Generator().manual_seed(seed)
    wanted = {
        ((a, x), (b, y))
        for a, b in itertools.combinations(names, 2)
        for x in range(len(options[a]))
        for y in range(len(options[b]))
    }
    while wanted:
        best: dict[str, int] = {}
        best_count = -1
        for _ in range(60):
            pick = {
                n: int(torch.randint(len(options[n]), (1,), generator=generator)) for n in names
            }
            count = sum(pick[a] == x and pick[b] == y for (a, x), (b, y) in wanted)
            if count > best_count:
                best, best_count = pick, count
        wanted = {
            pair
            for pair in wanted
            if not (best[pair[0][0]] == pair[0][1] and best[pair[1][0]] == pair[1][1])
        }
        if best_count > 0:
            yield {n: options[n][best[n]] for n in names}


def product(options):
    return [
        dict(zip(options, values, strict=True)) for values in itertools.product(*options.values())
    ]


def combinations():
    """Pairwise in the interpreter; compiled, every shape, and every option on one shape."""
    if INTERPRET:
        return list(pairwise(OPTIONS))
    plain = {key: values[:1] for key, values in OPTIONS.items()}
    shapes = {key: OPTIONS[key] for key in ("heads", "head_dim", "block_size", "dtype")}
    extras = {key: OPTIONS[key] for key in ("dtype", "window", "soft_cap", "sinks")}
    return product({**plain, **shapes}) + product({**plain, "heads": [(15, 5)], **extras})


def name(combination):
    return "-".join(str(value).removeprefix("torch.") for value in combination.values())


DTYPES = [torch.float32, torch.float16] + ([] if INTERPRET else [torch.bfloat16])
OPTIONS = {
    "heads": HEADS,
    "head_dim": [64, 80, 96, 128, 192, 256],
    "block_size": [16, 32, 48, 256],
    "dtype": DTYPES,
    "window": [None, 7, 40],
    "soft_cap": [0.0, 5.0],
    "sinks": [False, True],
}


def make(combination, **more):
    combination = dict(combination)
    num_heads, num_kv_heads = combination.pop("heads")
    return Case(
        num_heads=num_heads, num_kv_heads=num_kv_heads, device=DEVICE, **combination, **more
    )


@pytest.mark.parametrize("options", combinations(), ids=name)
def test_decode_equals_dense_float64(options):
    block = options["block_size"]
    lengths = [1, block, block + 1, 75, 0 + 2]
    case = make(options, query_lens=[1] * 5, past=[length - 1 for length in lengths], shared=True)
    check(case, decode(case, tile=32 if INTERPRET else 0))


@pytest.mark.parametrize("options", combinations(), ids=name)
def test_prefill_equals_dense_float64(options):
    block = options["block_size"]
    case = make(
        options, query_lens=[5, 1, block + 1, 0, 33], past=[0, 20, 3, 4, block], shared=True
    )
    found = prefill(case, shape=(32, 32) if INTERPRET else None)
    check(case, found)


@pytest.mark.parametrize("split", [1, 5, 16, 32, 64, 1000])
@pytest.mark.parametrize("window", [None, 20, 150])
def test_any_number_of_splits_is_one_pass(split, window, monkeypatch):
    monkeypatch.setattr(decode_plan, "SPLIT_STEP", 1)
    case = Case([1] * 4, [0, 15, 99, 40], window=window, sinks=True, device=DEVICE)
    plan = plan_decode(case.lengths, 2, torch.device(DEVICE), 1, window, split=split)
    check(case, decode(case, plan=plan, tile=16))


def test_a_row_is_cut_into_pieces_that_cover_it():
    for size in [0, 1, 63, 64, 65, 127, 128, 129, 1000, 8192]:
        for split in [1, 64, 100, 128, 8064]:
            pieces = cut(size, split)
            assert pieces[0][0] == 0 and pieces[-1][1] == size
            assert all(a[1] == b[0] for a, b in itertools.pairwise(pieces))
            assert all(end > begin for begin, end in pieces) or size == 0
    # A little more than a split is not worth a second one.
    assert cut(8192, 8064) == [(0, 8192)]


def test_rows_of_length_zero_yield_nothing():
    case = Case([1, 1], [4, 20], device=DEVICE)
    wanted, _ = case.expected()
    case.seq_lens[0] = 0
    out, lse = decode(case)
    assert (out[0] == 0).all() and (lse[0] == -math.inf).all()
    assert error(out[1:], wanted[1:]) < LIMIT[case.dtype]


def test_padding_of_the_batch_is_left_alone():
    case = Case([3, 2], [5, 0], device=DEVICE)
    padded = torch.cat((case.query, torch.full_like(case.query[:2], math.nan)))
    out = torch.full_like(padded, 7.0)
    case.query = padded
    prefill(case, out=out)
    case.query = padded[:5]
    wanted, _ = case.expected()
    assert error(out[:5], wanted) < LIMIT[case.dtype]
    assert (out[5:] == 7.0).all()


def test_any_chunking_is_one_prefill():
    whole = Case([60], [0], num_heads=6, num_kv_heads=2, device=DEVICE)
    wanted, _ = whole.expected()
    for chunk in (1, 7, 16, 59):
        pieces = []
        for start in range(0, 60, chunk):
            size = min(chunk, 60 - start)
            lengths = [start + size]
            out, _ = paged_prefill(
                whole.query[start : start + size].contiguous(),
                whole.cache,
                whole.table,
                torch.tensor([0, size], dtype=torch.int32, device=DEVICE),
                torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
                whole.scale,
                query_lens=[size],
                lengths=lengths,
            )
            pieces.append(out)
        assert error(torch.cat(pieces), wanted) < LIMIT[whole.dtype]


def test_decode_and_prefill_agree_on_rows_of_one_token():
    case = Case([1] * 3, [0, 30, 64], num_heads=9, num_kv_heads=3, device=DEVICE)
    a, b = decode(case), prefill(case)
    assert error(a[0], b[0].double().cpu()) < 1e-6
    assert error(a[1], b[1].double().cpu()) < 1e-6


@pytest.mark.parametrize("window", [1, 9, 20])
@pytest.mark.parametrize("gathered", [False, True])
def test_pages_before_the_window_may_hold_anything(window, gathered):
    case = Case([1, 1, 3, 40], [70, 99, 50, 90], window=window, lost=True, device=DEVICE)
    if not gathered:
        check(case, prefill(case))
        ones = Case([1, 1, 1], [70, 99, 3], window=window, lost=True, device=DEVICE)
        check(ones, decode(ones))
        return
    dense, key_start = kv_gather(case.cache, case.table, case.seq_lens, case.lengths)
    check(case, prefill(case, dense=(dense[0], dense[1]), key_start=key_start))


@pytest.mark.parametrize("window", [None, 9])
def test_gathered_keys_are_the_paged_ones(window):
    case = Case([20, 1, 0, 3], [13, 40, 2, 0], head_dim=80, window=window, device=DEVICE)
    dense, key_start = kv_gather(case.cache, case.table, case.seq_lens, case.lengths)
    start = 0
    for row, length in enumerate(case.lengths):
        assert torch.equal(dense[0, start : start + length].transpose(0, 1).cpu(), case.keys[row])
        assert torch.equal(dense[1, start : start + length].transpose(0, 1).cpu(), case.values[row])
        start += length
    check(case, prefill(case, dense=(dense[0], dense[1]), key_start=key_start))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots_dtype", [torch.int64, torch.int32])
def test_write_goes_to_its_slots_and_nowhere_else(dtype, slots_dtype):
    torch.manual_seed(0)
    heads, dim, block, blocks = 3, 80, 16, 5
    cache = torch.full((2, blocks, heads, block, dim), 9.0, dtype=dtype, device=DEVICE)
    slots = torch.tensor([3, -1, 79, 16, -1, 15, 0], dtype=slots_dtype, device=DEVICE)
    # As the model hands them over: slices of a wider tensor.
    wide = torch.randn(7, 4 * heads, dim, device=DEVICE).to(dtype)
    key, value = wide[:, heads : 2 * heads], wide[:, 3 * heads :]
    expected = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[0, slot // block, :, slot % block] = key[token]
            expected[1, slot // block, :, slot % block] = value[token]
    kv_write(key, value, cache, slots)
    assert torch.equal(cache, expected)


def test_write_of_nothing_does_nothing():
    cache = torch.zeros(2, 2, 1, 16, 64, device=DEVICE)
    empty = torch.zeros(0, 1, 64, device=DEVICE)
    kv_write(empty, empty, cache, torch.zeros(0, dtype=torch.int64, device=DEVICE))
    assert (cache == 0).all()


def test_merging_parts_in_any_grouping_gives_the_whole():
    torch.manual_seed(1)
    heads, dim, keys = 3, 80, 30
    query = torch.randn(4, heads, dim, dtype=torch.float64)
    key, value = (torch.randn(heads, keys, dim, dtype=torch.float64) for _ in range(2))

    def attend(start, end):
        scores = torch.einsum("thd,hkd->thk", query, key[:, start:end])
        lse = scores.logsumexp(-1)
        out = torch.einsum("thk,hkd->thd", scores.softmax(-1), value[:, start:end])
        if start == end:
            out = torch.full_like(out, math.nan)
        return out.float().to(DEVICE), lse.float().to(DEVICE)

    whole = attend(0, keys)
    a, b, c, nothing = attend(0, 11), attend(11, 12), attend(12, keys), attend(5, 5)
    left = merge_lse(*merge_lse(*a, *b), *c)
    right = merge_lse(*a, *merge_lse(*b, *c))
    padded = merge_lse(*nothing, *merge_lse(*left, *nothing))
    for found in (left, right, padded):
        assert error(found[0], whole[0].double().cpu()) < 2e-6
        assert error(found[1], whole[1].double().cpu()) < 2e-6
    _, lse = merge_lse(*nothing, *nothing)
    assert (lse == -math.inf).all()


def test_merged_prefix_and_rest_equal_one_pass():
    case = Case([1, 1], [63, 79], device=DEVICE)
    wanted, lse = case.expected()
    first = [32, 32]
    lens = torch.tensor(first, dtype=torch.int32, device=DEVICE)
    a = paged_decode(case.query, case.cache, case.table, lens, case.scale)
    rest = [length - 32 for length in case.lengths]
    lens = torch.tensor(rest, dtype=torch.int32, device=DEVICE)
    table = case.table[:, 2:].contiguous()
    b = paged_decode(case.query, case.cache, table, lens, case.scale)
    out, found = merge_lse(*a, *b)
    assert error(out, wanted) < LIMIT[case.dtype]
    assert error(found, lse) < LIMIT[case.dtype]


@pytest.mark.parametrize("split", [16, 1000])
def test_decode_leaves_the_other_rows_of_a_mixed_batch_alone(split, monkeypatch):
    monkeypatch.setattr(decode_plan, "SPLIT_STEP", 1)
    case = Case([1, 4, 1, 0, 1], [40, 3, 0, 9, 17], device=DEVICE)
    wanted, sums = case.expected()
    lengths = [
        length if new == 1 else None
        for length, new in zip(case.lengths, case.query_lens, strict=True)
    ]
    tokens = case.query_start.tolist()
    plan = plan_decode(lengths, 2, torch.device(DEVICE), 1, split=split, tokens=tokens)
    out = torch.full_like(case.query, 7.0)
    lse = torch.full((7, 4), 7.0, device=DEVICE)
    decode(case, plan=plan, out=out, lse=lse, tile=16)
    tokens = [0, 5, 6]
    assert error(out[tokens], wanted[tokens]) < LIMIT[case.dtype]
    assert error(lse[tokens], sums[tokens]) < LIMIT[case.dtype]
    assert (out[1:5] == 7.0).all() and (lse[1:5] == 7.0).all()


@pytest.mark.skipif(INTERPRET, reason="needs a GPU")
def test_offsets_beyond_32_bits_are_reached():
    block, heads, dim = 16, 8, 128
    blocks = 2**32 // (heads * block * dim) // 2 + 300  # keys alone pass 2**31 elements
    cache = torch.zeros(2, blocks, heads, block, dim, dtype=torch.bfloat16, device=DEVICE)
    key = torch.randn(2, heads, dim, dtype=torch.bfloat16, device=DEVICE)
    value = torch.randn_like(key)
    slots = torch.tensor([(blocks - 1) * block, (blocks - 1) * block + 1], device=DEVICE)
    kv_write(key, value, cache, slots)
    assert torch.equal(cache[0, -1, :, 0], key[0]) and torch.equal(cache[1, -1, :, 1], value[1])
    table = torch.tensor([[blocks - 1]], dtype=torch.int32, device=DEVICE)
    lens = torch.tensor([2], dtype=torch.int32, device=DEVICE)
    query = torch.randn(1, heads, dim, dtype=torch.bfloat16, device=DEVICE)
    out, _ = paged_decode(query, cache, table, lens, dim**-0.5)
    scores = torch.einsum("hd,khd->hk", query[0].double(), key.double()) * dim**-0.5
    wanted = torch.einsum("hk,khd->hd", scores.softmax(-1), value.double())
    assert error(out[0], wanted.cpu()) < LIMIT[torch.bfloat16]
