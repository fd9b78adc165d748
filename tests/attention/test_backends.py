"""The torch backends against dense float64 attention, over pools whose unowned slots are NaN."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nanofixtures.forward import make_metadata
from nanokernels.runtime import INTERPRET

from nanoserve.attention import torch_paged
from nanoserve.attention.dense import DenseBackend
from nanoserve.attention.torch_paged import TorchPagedBackend
from nanoserve.attention.triton_paged import TritonPagedBackend
from nanoserve.forward import AttentionMetadata, AttentionShape

TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


def reference(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, shape: AttentionShape
) -> torch.Tensor:
    """Float64 attention of a row's last queries, one query and one head at a time."""
    query, key, value = query.double(), key.double(), value.double()
    output = torch.zeros_like(query)
    past = len(key) - len(query)
    for i in range(len(query)):
        first = 0
        if shape.sliding_window is not None:
            first = max(0, past + i + 1 - shape.sliding_window)
        for head in range(shape.num_heads):
            kv_head = head * shape.num_kv_heads // shape.num_heads
            seen = slice(first, past + i + 1)
            scores = key[seen, kv_head] @ query[i, head] * shape.scale
            output[i, head] = scores.softmax(0) @ value[seen, kv_head]
    return output


@dataclass
class Row:
    """One sequence: what its tokens' queries, keys and values are, and how much is new."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    num_new: int


class Pool:
    """A cache of NaN, rows laid out over it, and one step run through a backend.

    Args:
        lengths: (new tokens, all tokens) of each row.
        padding: tokens of slot -1 after the rows' own.
    """

    def __init__(
        self,
        backend: Any,
        shape: AttentionShape,
        lengths: list[tuple[int, int]],
        *,
        block_size: int = 4,
        padding: int = 0,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        self.device = device
        generator = torch.Generator().manual_seed(seed)

        def randn(*size: int) -> torch.Tensor:
            return torch.randn(*size, generator=generator).to(device, dtype)

        self.backend, self.shape, self.padding = backend, shape, padding
        longest = max((length for _, length in lengths), default=1)
        self.block_size = longest if backend.name == "dense" else block_size
        per_row = max(1, -(-longest // self.block_size))
        num_blocks = 1 + per_row * max(len(lengths), 1)
        order = torch.randperm(num_blocks - 1, generator=generator) + 1
        self.tables = order.view(-1, per_row)
        heads, kv_heads, size = shape.num_heads, shape.num_kv_heads, shape.head_dim
        self.rows = [
            Row(randn(new, heads, size), randn(n, kv_heads, size), randn(n, kv_heads, size), new)
            for new, n in lengths
        ]
        self.cache = torch.full(
            backend.kv_cache_shape(num_blocks, self.block_size, kv_heads, size),
            float("nan"),
            dtype=dtype,
            device=device,
        )

    def metadata(self, past: bool = False) -> AttentionMetadata:
        """Of the step; or, with `past`, of one that stores all that came before it."""
        lengths = [(row.num_new, len(row.key)) for row in self.rows]
        if past:
            lengths = [(n - new, n - new) for new, n in lengths]
        query_lens, seq_lens = [new for new, _ in lengths], [n for _, n in lengths]
        padding = 0 if past else self.padding
        return make_metadata(
            query_lens, seq_lens, self.tables, self.block_size, padding, self.device
        )

    def store_past(self) -> None:
        """Fill the cache with the rows' earlier keys and values, by the backend's own write."""
        keys = torch.cat([row.key[: len(row.key) - row.num_new] for row in self.rows])
        values = torch.cat([row.value[: len(row.value) - row.num_new] for row in self.rows])
        queries = keys.new_zeros(len(keys), self.shape.num_heads, self.shape.head_dim)
        metadata = self.metadata(past=True)
        self.backend.prepare(metadata)
        self.backend.forward(queries, keys, values, self.cache, self.shape, metadata)

    def lose_what_no_window_reaches(self) -> None:
        """Point table entries before the window at the null block, which holds NaN here."""
        if self.shape.sliding_window is None or self.backend.name == "dense":
            return
        for table, row in zip(self.tables, self.rows, strict=True):
            past = len(row.key) - row.num_new
            table[: max(0, past + 1 - self.shape.sliding_window) // self.block_size] = 0

    def step(self) -> torch.Tensor:
        """Run the step; padding tokens carry NaN."""

        def pad(tensor: torch.Tensor) -> torch.Tensor:
            extra = tensor.new_full((self.padding, *tensor.shape[1:]), float("nan"))
            return torch.cat((tensor, extra))

        query = pad(torch.cat([row.query for row in self.rows]))
        key = pad(torch.cat([row.key[len(row.key) - row.num_new :] for row in self.rows]))
        value = pad(torch.cat([row.value[len(row.value) - row.num_new :] for row in self.rows]))
        # The model hands over strided views of one fused tensor; so do we.
        fused = torch.cat((query, key, value), dim=1)
        heads = (self.shape.num_heads, self.shape.num_kv_heads, self.shape.num_kv_heads)
        query, key, value = fused.split(heads, dim=1)
        metadata = self.metadata()
        self.backend.prepare(metadata)
        return self.backend.forward(query, key, value, self.cache, self.shape, metadata)

    def expected(self) -> torch.Tensor:
        return torch.cat([reference(r.query, r.key, r.value, self.shape) for r in self.rows])

    def check(self) -> torch.Tensor:
        self.store_past()
        self.lose_what_no_window_reaches()
        output = self.step()
        own = output[: len(output) - self.padding]
        error = (own.double() - self.expected()).abs()
        assert bool(own.isfinite().all()), "NaN from slots that no row owns reached the output"
        limit = TOLERANCE[output.dtype]
        assert error.numel() == 0 or error.max() < limit, f"off by {error.max():.2e}"
        return output


def make_shape(
    num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 16, window: int | None = None
) -> AttentionShape:
    return AttentionShape(num_heads, num_kv_heads, head_dim, head_dim**-0.5, window)


# On a GPU its tests run compiled; here interpreted, on a few cases of its own.
GPU_BACKENDS = [DenseBackend, TorchPagedBackend, TritonPagedBackend]
BACKENDS = [DenseBackend, TorchPagedBackend]
# (new tokens, all tokens) of each row.
MIXES = {
    "mixed": [(1, 30), (1, 9), (12, 12), (7, 29), (0, 5)],
    "decodes": [(1, 1), (1, 40), (0, 3), (1, 17)],
    "fresh prefills": [(5, 5), (33, 33), (1, 1), (2, 2)],
    "long prefill over a past": [(300, 317), (1, 8), (4, 4)],
}
row_lengths = st.integers(1, 40).flatmap(
    lambda n: st.tuples(st.one_of(st.just(1), st.just(n), st.integers(0, n)), st.just(n))
)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    lengths=st.lists(row_lengths, min_size=1, max_size=6),
    block_size=st.sampled_from([1, 3, 4, 16]),
    kv_heads=st.integers(1, 3),
    ratio=st.sampled_from([1, 2, 3, 5, 16]),
    head_dim=st.sampled_from([8, 20, 24, 64]),
    window=st.sampled_from([None, None, 1, 5, 16]),
    padding=st.sampled_from([0, 0, 3]),
    seed=st.integers(0, 100),
)
def test_AT1_AT2_AT3_AT5_any_step_equals_float64(
    backend: Any,
    lengths: list[tuple[int, int]],
    block_size: int,
    kv_heads: int,
    ratio: int,
    head_dim: int,
    window: int | None,
    padding: int,
    seed: int,
) -> None:
    shape = make_shape(kv_heads * ratio, kv_heads, head_dim, window)
    Pool(backend(), shape, lengths, block_size=block_size, padding=padding, seed=seed).check()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 6])
def test_AT1_half_precision(backend: Any, dtype: torch.dtype, window: int | None) -> None:
    lengths = [(1, 30), (1, 9), (12, 12), (7, 29), (0, 5)]
    Pool(backend(), make_shape(window=window), lengths, dtype=dtype).check()


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 6, 8, 12, 16])
def test_AT5_every_gqa_ratio(ratio: int) -> None:
    shape = make_shape(2 * ratio, 2, head_dim=12)
    Pool(TorchPagedBackend(), shape, [(1, 17), (5, 18), (9, 9)]).check()


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_AT1_lengths_around_a_block_edge(length: int) -> None:
    Pool(TorchPagedBackend(), make_shape(), [(1, length), (length, length), (1, 1)]).check()


def test_AT1_blocks_shared_between_rows() -> None:
    pool = Pool(TorchPagedBackend(), make_shape(), [(1, 13), (1, 11), (5, 14)])
    for row in pool.rows[1:]:
        row.key[:8], row.value[:8] = pool.rows[0].key[:8], pool.rows[0].value[:8]
    pool.tables[1:, :2] = pool.tables[0, :2]
    pool.check()


def test_AT1_ragged_decodes_are_split_so_that_short_rows_stay_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_paged, "MAX_WASTED_PAGES", 4)
    lengths = [(1, n) for n in (3, 200, 5, 4, 190, 64, 1, 60)]
    pool = Pool(TorchPagedBackend(), make_shape(), lengths)
    pool.check()
    metadata = pool.metadata()
    pool.backend.prepare(metadata)
    groups = [sorted(group.lengths) for group in metadata.scratch.decodes]
    assert groups == [[190, 200], [60, 64], [1, 3, 4, 5]]


def test_AT2_rows_without_new_tokens_read_and_write_nothing() -> None:
    for backend in (DenseBackend(), TorchPagedBackend()):
        pool = Pool(backend, make_shape(), [(0, 9), (1, 7), (0, 0), (4, 6), (0, 3)])
        pool.store_past()
        before = pool.cache.clone()
        pool.step()
        changed = ~((pool.cache == before) | (pool.cache.isnan() & before.isnan()))
        written = 1 + 4
        assert changed.sum() == 2 * written * pool.shape.num_kv_heads * pool.shape.head_dim


@pytest.mark.parametrize("backend", BACKENDS)
def test_A09_padding_is_written_nowhere(backend: Any) -> None:
    pool = Pool(backend(), make_shape(), [(1, 6), (1, 3), (1, 7), (0, 8)], padding=2)
    pool.store_past()
    slots = pool.metadata().slot_mapping
    block_dim = pool.cache.shape.index(pool.block_size, 2)
    last_slot = pool.cache.narrow(1, -1, 1).narrow(block_dim, -1, 1)
    assert (pool.cache.shape[1] * pool.block_size - 1) not in slots
    last_slot.fill_(7.0)
    output = pool.step()
    assert bool((last_slot == 7.0).all()), "slot -1 hit the pool's last slot"
    assert bool((output[3:] == 0).all()), "padding reads nothing"


def test_AT3_prefill_over_a_cached_prefix_equals_the_whole() -> None:
    for backend in (DenseBackend(), TorchPagedBackend()):
        outputs = []
        for new in (30, 29, 16, 1):
            pool = Pool(backend, make_shape(), [(30, 30)], seed=5)
            row = pool.rows[0]
            row.query, row.num_new = row.query[30 - new :], new
            outputs.append(pool.check())
        for output in outputs[1:]:
            assert torch.allclose(output, outputs[0][30 - len(output) :], atol=2e-6)


def test_AT3_long_prefills_are_masked_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_paged, "QUERY_CHUNK", 7)
    for window in (None, 9):
        Pool(TorchPagedBackend(), make_shape(window=window), [(30, 41), (25, 25)]).check()


def test_one_backend_serves_layers_of_several_shapes_in_one_step() -> None:
    backend = TorchPagedBackend()
    lengths = [(1, 20), (6, 15), (1, 4)]
    for shape in (make_shape(), make_shape(window=5), make_shape(8, 4, 8), make_shape()):
        Pool(backend, shape, lengths).check()


def test_layers_of_unlike_window_share_one_metadata() -> None:
    pool = Pool(TorchPagedBackend(), make_shape(), [(1, 20), (6, 15)])
    pool.store_past()
    metadata = pool.metadata()
    pool.backend.prepare(metadata)
    query = torch.cat([row.query for row in pool.rows])
    key = torch.cat([row.key[-row.num_new :] for row in pool.rows])
    value = torch.cat([row.value[-row.num_new :] for row in pool.rows])
    for window in (None, 5, None):
        pool.shape = make_shape(window=window)
        output = pool.backend.forward(query, key, value, pool.cache, pool.shape, metadata)
        assert torch.allclose(output.double(), pool.expected(), atol=2e-6)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("backend", GPU_BACKENDS)
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("lengths", list(MIXES.values()), ids=list(MIXES))
def test_AT1_on_a_gpu(backend: Any, window: int | None, lengths: list[tuple[int, int]]) -> None:
    Pool(backend(), make_shape(window=window), lengths, padding=2, device="cuda").check()


@pytest.mark.skipif(not INTERPRET, reason="runs compiled on a GPU instead")
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("lengths", list(MIXES.values()), ids=list(MIXES))
def test_AT1_in_the_interpreter(window: int | None, lengths: list[tuple[int, int]]) -> None:
    Pool(TritonPagedBackend(), make_shape(3 * 2, 2, 20, window), lengths, padding=2).check()


def test_an_empty_step_gives_an_empty_answer() -> None:
    for backend in (DenseBackend(), TorchPagedBackend()):
        pool = Pool(backend, make_shape(), [(0, 4)])
        pool.store_past()
        assert pool.step().shape == (0, 4, 16)
