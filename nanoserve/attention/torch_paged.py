"""Attention over pages in plain torch: the CPU's backend, and the reference for the kernels.

Rows with one new token (decodes) are gathered through the block table together, whole pages at a
time, and attended with two batched matrix products; rows with more (prefills) go one by one. What
depends only on lengths and tables is worked out once a step and shared by all layers. A page lies
head by head ([num_kv_heads, block_size, head_dim]), so that the pages of one head, put side by
side, are already the matrix that the product needs.

Slots that no token owns may hold anything, NaN too: they are never read, or read and set to zero
before use.
"""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from nanoserve.forward import AttentionMetadata, AttentionShape

# Decode rows of unlike length go in separate batches once padding them to one length would copy
# this many pages more; a batch of its own costs about as much as copying that many.
MAX_WASTED_PAGES = 32
# Prefill queries are attended this many at a time where a mask is needed, which bounds the mask.
QUERY_CHUNK = 512


@dataclass
class DecodeGroup:
    """Decode rows of like length, padded to the longest.

    Attributes:
        rows: indices into the batch's rows.
        tokens: the rows' tokens in the batch: a slice when they are consecutive, else [n] int64.
        lengths: tokens in each row, on the host.
        layouts: what to gather, by (num_kv_heads, sliding window): filled by the first layer that
            asks.
    """

    rows: list[int]
    tokens: slice | torch.Tensor
    lengths: list[int]
    layouts: dict[tuple[int, int | None], "GatherLayout"] = field(default_factory=dict)


@dataclass
class GatherLayout:
    """How a set of rows' pages become dense keys and values, for layers of one shape.

    Attributes:
        pages: [2 * n * num_kv_heads * num_pages] int64, rows of the cache seen as a table of
            pages of one head: all keys, then all values.
        stale: positions (in the gathered table of single tokens) that no row owns.
        bias: [n * num_kv_heads, 1, num_pages * block_size]: 0 where visible, else -inf.
    """

    pages: torch.Tensor
    stale: torch.Tensor
    bias: torch.Tensor


@dataclass
class StepPlan:
    """One step's work for all layers.

    Attributes:
        writes: by num_kv_heads, the cache rows (seen as a table of one head's tokens) that the new
            keys go to, [num_written * num_kv_heads].
        written: the tokens that are stored, None when all are (no padding).
        decodes: rows with one new token.
        prefills: (row, first token, last token + 1) of rows with more.
        num_tokens: tokens that belong to rows; the batch may carry padding after them.
    """

    written: torch.Tensor | None
    decodes: list[DecodeGroup]
    prefills: list[tuple[int, int, int]]
    num_tokens: int
    writes: dict[int, torch.Tensor] = field(default_factory=dict)


class TorchPagedBackend:
    """Paged attention with torch operations, on any device."""

    name = "torch_paged"

    def __init__(self) -> None:
        self._workspace: torch.Tensor | None = None

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """[2 (keys, values), num_blocks, num_kv_heads, block_size, head_dim]."""
        return (2, num_blocks, num_kv_heads, block_size, head_dim)

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Sort the rows into decodes and prefills and find the padding."""
        decode_rows, decode_tokens, prefills, start = [], [], [], 0
        for row, num_new in enumerate(metadata.query_lens):
            if num_new == 1:
                decode_rows.append(row)
                decode_tokens.append(start)
            elif num_new > 1:
                prefills.append((row, start, start + num_new))
            start += num_new
        slots = metadata.slot_mapping
        stored = slots >= 0
        written = None if bool(stored.all()) else torch.nonzero(stored).flatten()
        decodes = _group_decodes(metadata, decode_rows, decode_tokens)
        metadata.scratch = StepPlan(written, decodes, prefills, num_tokens=start)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        shape: AttentionShape,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """See `nanoserve.forward.AttentionBackend`."""
        plan: StepPlan = metadata.scratch
        write_kv(key, value, kv_cache, plan, metadata)
        if len(plan.decodes) == 1 and len(plan.decodes[0].rows) == len(query):
            return self._decode(query, kv_cache, shape, plan.decodes[0], metadata)
        padded = plan.num_tokens < len(query)
        output = query.new_zeros(query.shape) if padded else query.new_empty(query.shape)
        for group in plan.decodes:
            output[group.tokens] = self._decode(
                query[group.tokens], kv_cache, shape, group, metadata
            )
        for row, start, end in plan.prefills:
            new = slice(start, end)
            output[new] = self._prefill(
                query[new], key[new], value[new], kv_cache, shape, row, metadata
            )
        return output

    def _decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        shape: AttentionShape,
        group: DecodeGroup,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """One query a row: [n, num_heads, head_dim] -> the same."""
        layout_key = (shape.num_kv_heads, shape.sliding_window)
        layout = group.layouts.get(layout_key)
        if layout is None:
            layout = group.layouts[layout_key] = _gather_layout(
                group.rows, group.lengths, [1] * len(group.rows), kv_cache, shape, metadata
            )
        keys, values = self._gather(kv_cache, layout, len(group.rows) * shape.num_kv_heads)
        heads = query.reshape(len(keys), -1, shape.head_dim)
        scores = torch.baddbmm(layout.bias, heads, keys.transpose(1, 2), alpha=shape.scale)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype)
        return torch.bmm(weights, values).view(query.shape)

    def _gather(
        self, kv_cache: torch.Tensor, layout: GatherLayout, num_sequences: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The layout's keys and values, each [num_sequences, num_pages * block_size, head_dim].

        They lie in a workspace that the next call overwrites.
        """
        block_size, head_dim = kv_cache.shape[-2:]
        pages = kv_cache.view(-1, block_size * head_dim)
        gathered = self._scratch_memory(len(layout.pages) * pages.shape[1], kv_cache)
        gathered = gathered.view(len(layout.pages), -1)
        torch.index_select(pages, 0, layout.pages, out=gathered)
        gathered.view(-1, head_dim).index_fill_(0, layout.stale, 0.0)
        keys, values = gathered.view(2, num_sequences, -1, head_dim).unbind(0)
        return keys, values

    def _scratch_memory(self, size: int, like: torch.Tensor) -> torch.Tensor:
        """`size` elements that stay allocated between calls: fresh pages would fault each time."""
        memory = self._workspace
        if (
            memory is None
            or len(memory) < size
            or memory.dtype != like.dtype
            or memory.device != like.device
        ):
            memory = self._workspace = like.new_empty(size + size // 4)
        return memory[:size]

    def _prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        shape: AttentionShape,
        row: int,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Several queries of one row: [num_new, num_heads, head_dim] -> the same."""
        num_new, length = len(query), metadata.seq_lens_cpu[row]
        window = shape.sliding_window
        queries = query.transpose(0, 1)
        if length == num_new and (window is None or window >= length):
            # Nothing cached and nothing out of sight: the new keys are all there is to see.
            return _attend(queries, key.transpose(0, 1), value.transpose(0, 1), shape, None)
        first = _first_visible(length - num_new, window, metadata.block_size)
        layout = _gather_layout([row], [length], [num_new], kv_cache, shape, metadata)
        keys, values = self._gather(kv_cache, layout, shape.num_kv_heads)
        keys, values = keys[:, : length - first], values[:, : length - first]
        parts = []
        for start in range(0, num_new, QUERY_CHUNK):
            end = min(start + QUERY_CHUNK, num_new)
            seen_from = length - num_new + start - first
            seen_to = length - num_new + end - first
            mask = _causal_mask(seen_from, seen_to, window, query.device)
            parts.append(
                _attend(queries[:, start:end], keys[:, :seen_to], values[:, :seen_to], shape, mask)
            )
        return torch.cat(parts)


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    plan: StepPlan,
    metadata: AttentionMetadata,
) -> None:
    """Store the new keys and values at their slots; padding (slot -1) is stored nowhere.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim].
        kv_cache: [2, num_blocks, num_kv_heads, block_size, head_dim].
    """
    num_kv_heads, block_size, head_dim = kv_cache.shape[2:]
    index = plan.writes.get(num_kv_heads)
    if index is None:
        slots = metadata.slot_mapping
        if plan.written is not None:
            slots = slots[plan.written]
        block = torch.div(slots, block_size, rounding_mode="floor").unsqueeze(1)
        head = torch.arange(num_kv_heads, device=slots.device)
        index = (block * num_kv_heads + head) * block_size + (slots % block_size).unsqueeze(1)
        index = plan.writes[num_kv_heads] = index.flatten()
    if plan.written is not None:
        key, value = key[plan.written], value[plan.written]
    kv_cache[0].view(-1, head_dim).index_copy_(0, index, key.reshape(-1, head_dim))
    kv_cache[1].view(-1, head_dim).index_copy_(0, index, value.reshape(-1, head_dim))


def _group_decodes(
    metadata: AttentionMetadata, rows: list[int], tokens: list[int]
) -> list[DecodeGroup]:
    """Split decode rows into groups of like length, so that short rows are not padded to long."""
    pages = [-(-metadata.seq_lens_cpu[row] // metadata.block_size) for row in rows]
    order = sorted(range(len(rows)), key=lambda i: -pages[i])
    groups: list[list[int]] = []
    wasted = 0
    for i in order:
        wasted += pages[groups[-1][0]] - pages[i] if groups else 0
        if not groups or wasted > MAX_WASTED_PAGES:
            groups.append([])
            wasted = 0
        groups[-1].append(i)
    device = metadata.slot_mapping.device
    result = []
    for group in groups:
        group.sort()
        own_tokens = [tokens[i] for i in group]
        where: slice | torch.Tensor = slice(own_tokens[0], own_tokens[-1] + 1)
        if own_tokens[-1] - own_tokens[0] >= len(group):
            where = torch.tensor(own_tokens, device=device)
        own_rows = [rows[i] for i in group]
        result.append(DecodeGroup(own_rows, where, [metadata.seq_lens_cpu[r] for r in own_rows]))
    return result


def _first_visible(first_query: int, window: int | None, block_size: int) -> int:
    """The first position that must be gathered: the start of the page the window reaches into."""
    if window is None:
        return 0
    return max(0, first_query - window + 1) // block_size * block_size


def _gather_layout(
    rows: list[int],
    lengths: list[int],
    new_tokens: list[int],
    kv_cache: torch.Tensor,
    shape: AttentionShape,
    metadata: AttentionMetadata,
) -> GatherLayout:
    """Which pages to gather for these rows, and which of the gathered positions are not theirs."""
    _, num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
    device, window = metadata.block_table.device, shape.sliding_window
    firsts = [
        _first_visible(length - new, window, block_size)
        for length, new in zip(lengths, new_tokens, strict=True)
    ]
    num_pages = max(
        -(-(length - first) // block_size) for length, first in zip(lengths, firsts, strict=True)
    )
    length = torch.tensor(lengths, device=device).unsqueeze(1)
    first = torch.tensor(firsts, device=device).unsqueeze(1)

    column = first // block_size + torch.arange(num_pages, device=device)
    owned_page = column * block_size < length
    table = metadata.block_table[torch.tensor(rows, device=device)].long()
    blocks = table.gather(1, column.clamp(max=table.shape[1] - 1)).masked_fill(~owned_page, 0)
    head = torch.arange(num_kv_heads, device=device).unsqueeze(1)
    pages = (blocks.unsqueeze(1) * num_kv_heads + head).flatten()
    pages = torch.cat((pages, pages + num_blocks * num_kv_heads))

    position = first + torch.arange(num_pages * block_size, device=device)
    owned = position < length
    visible = owned
    if window is not None:
        # Of use to single queries only; prefills bring masks of their own.
        visible = owned & (position >= length - window)
    bias = torch.zeros(visible.shape, dtype=kv_cache.dtype, device=device)
    bias = bias.masked_fill(~visible, float("-inf")).repeat_interleave(num_kv_heads, dim=0)
    stale = torch.nonzero(~owned.repeat_interleave(num_kv_heads, dim=0).repeat(2, 1).flatten())
    return GatherLayout(pages, stale.flatten(), bias.unsqueeze(1))


def _causal_mask(
    first_query: int, end_query: int, window: int | None, device: torch.device
) -> torch.Tensor:
    """[queries, end_query] bool: what each query may see, itself the last."""
    query = torch.arange(first_query, end_query, device=device).unsqueeze(1)
    key = torch.arange(end_query, device=device)
    visible = key <= query
    return visible if window is None else visible & (key > query - window)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    shape: AttentionShape,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Softmax attention of one row.

    Args:
        query: [num_heads, num_queries, head_dim].
        key, value: [num_kv_heads, num_keys, head_dim].
        mask: [num_queries, num_keys] bool; None is causal, with as many queries as keys.

    Returns:
        [num_queries, num_heads, head_dim].
    """
    heads_per_kv_head = shape.num_heads // shape.num_kv_heads
    if heads_per_kv_head > 1:
        key = key.repeat_interleave(heads_per_kv_head, dim=0)
        value = value.repeat_interleave(heads_per_kv_head, dim=0)
    attended = F.scaled_dot_product_attention(
        query.unsqueeze(0),
        key.unsqueeze(0),
        value.unsqueeze(0),
        attn_mask=mask,
        is_causal=mask is None,
        scale=shape.scale,
    )
    return attended[0].transpose(0, 1)
