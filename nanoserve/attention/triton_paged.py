"""Attention over pages by the Triton kernels: the GPU's backend.

A step's rows are told apart once: rows with one new token go to the split-KV decode kernel, rows
with more to the prefill kernel, which reads through the block table, or, where that is dearer, from
keys that lie side by side: the step's own if no row has a past, else gathered ones. The work lists
depend on lengths alone and are shared by all layers of like shape. Slots that no token owns are
never read.
"""

from dataclasses import dataclass, field

import torch
from nanokernels.runtime import require_triton

from nanoserve.forward import AttentionMetadata, AttentionShape

# From this many new tokens in a row on, gathering a row's keys costs less than looking up their
# pages once for every tile of queries.
GATHER_FROM = 256
# The copy engine moves boxes whose rows begin at multiples of this.
BOX_ALIGNMENT_BYTES = 16


@dataclass
class StepPlan:
    """One step's rows, by kind.

    Attributes:
        decode_lengths: tokens of each row with one new token, None for other rows.
        decode_tokens: each row's first token.
        prefill_lens: new tokens of each row with more than one, 0 for other rows.
        fresh: whether no prefill row has a past.
        gather: whether prefill rows are read from keys that lie side by side.
        padded: whether tokens follow that belong to no row.
        lists: work lists, by the layer's shape.
    """

    decode_lengths: list[int | None]
    decode_tokens: list[int]
    prefill_lens: list[int]
    fresh: bool
    gather: bool
    padded: bool
    lists: dict[tuple[object, ...], object] = field(default_factory=dict)

    @property
    def has_decodes(self) -> bool:
        """Whether some row has one new token."""
        return any(length is not None for length in self.decode_lengths)

    @property
    def has_prefills(self) -> bool:
        """Whether some row has more."""
        return any(self.prefill_lens)


class TritonPagedBackend:
    """Paged attention with the kernels of nanokernels.

    Raises:
        KernelUnavailableError: no Triton kernel can run in this process.
    """

    name = "triton_paged"

    def __init__(self) -> None:
        require_triton()

    def kv_cache_shape(
        self, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int
    ) -> tuple[int, ...]:
        """[2 (keys, values), num_blocks, num_kv_heads, block_size, head_dim]."""
        return (2, num_blocks, num_kv_heads, block_size, head_dim)

    def prepare(self, metadata: AttentionMetadata) -> None:
        """Tell the rows apart."""
        lens, lengths = metadata.query_lens, metadata.seq_lens_cpu
        starts, start = [], 0
        for count in lens:
            starts.append(start)
            start += count
        prefills = [count if count > 1 else 0 for count in lens]
        metadata.scratch = StepPlan(
            decode_lengths=[
                length if count == 1 else None for count, length in zip(lens, lengths, strict=True)
            ],
            decode_tokens=starts,
            prefill_lens=prefills,
            fresh=all(
                count == length for count, length in zip(prefills, lengths, strict=True) if count
            ),
            gather=max(prefills, default=0) >= GATHER_FROM,
            padded=start < len(metadata.slot_mapping),
        )

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
        from nanokernels.kv_write import kv_write

        plan: StepPlan = metadata.scratch
        kv_write(key, value, kv_cache, metadata.slot_mapping)
        # What belongs to no row is nobody's result, but it must not turn into NaN further on.
        make = torch.zeros if plan.padded else torch.empty
        out = make(query.shape, dtype=query.dtype, device=query.device)
        lse = torch.empty(query.shape[:2], dtype=torch.float32, device=query.device)
        if plan.has_decodes:
            self._decode(query, kv_cache, shape, metadata, out, lse)
        if plan.has_prefills:
            self._prefill(query, key, value, kv_cache, shape, metadata, out, lse)
        return out

    def _decode(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        shape: AttentionShape,
        metadata: AttentionMetadata,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        from nanokernels.decode_plan import plan_decode
        from nanokernels.launch import multiprocessors
        from nanokernels.paged_decode import paged_decode

        plan: StepPlan = metadata.scratch
        name = ("decode", shape.num_kv_heads, shape.sliding_window)
        if name not in plan.lists:
            plan.lists[name] = plan_decode(
                plan.decode_lengths,
                shape.num_kv_heads,
                query.device,
                multiprocessors(query.device),
                shape.sliding_window,
                tokens=plan.decode_tokens,
            )
        paged_decode(
            query,
            kv_cache,
            metadata.block_table,
            metadata.seq_lens,
            shape.scale,
            plan=plan.lists[name],  # type: ignore[arg-type]
            out=out,
            lse=lse,
        )

    def _prefill(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        shape: AttentionShape,
        metadata: AttentionMetadata,
        out: torch.Tensor,
        lse: torch.Tensor,
    ) -> None:
        from nanokernels.launch import power_of_two
        from nanokernels.paged_prefill import default_shape, paged_prefill, tile_tokens
        from nanokernels.prefill_plan import plan_prefill

        plan: StepPlan = metadata.scratch
        group = shape.num_heads // shape.num_kv_heads
        tile = default_shape(
            power_of_two(shape.head_dim), query.dtype, max(plan.prefill_lens), group
        )
        name = ("prefill", group, tile)
        if name not in plan.lists:
            plan.lists[name] = plan_prefill(
                plan.prefill_lens, metadata.seq_lens_cpu, tile_tokens(group, tile[0]), query.device
            )
        gather = plan.gather and shape.sliding_window is None
        dense, key_start = self._side_by_side(key, value, kv_cache, metadata, gather)
        paged_prefill(
            query,
            kv_cache,
            metadata.block_table,
            metadata.query_start_loc,
            metadata.seq_lens,
            shape.scale,
            query_lens=plan.prefill_lens,
            lengths=metadata.seq_lens_cpu,
            plan=plan.lists[name],  # type: ignore[arg-type]
            dense=dense,
            key_start=key_start,
            sliding_window=shape.sliding_window,
            out=out,
            lse=lse,
            shape=tile,
        )

    def _side_by_side(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
        gather: bool,
    ) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor | None]:
        """The prefill rows' keys and values as matrices, and where each row's begin; or neither."""
        from nanokernels.kv_gather import kv_gather

        plan: StepPlan = metadata.scratch
        if plan.fresh and _can_be_copied(key) and _can_be_copied(value):
            # The step's own keys are all that its prefill rows have.
            return (key, value), metadata.query_start_loc
        # Of a window, most of what would be gathered is not read.
        if not gather or not _can_be_copied(kv_cache[0]):
            return None, None
        if ("lengths",) not in plan.lists:
            lengths = [
                length if count else 0
                for count, length in zip(plan.prefill_lens, metadata.seq_lens_cpu, strict=True)
            ]
            on_device = torch.tensor(lengths, dtype=torch.int32, device=key.device)
            plan.lists[("lengths",)] = (lengths, on_device)
        lengths, on_device = plan.lists[("lengths",)]  # type: ignore[misc]
        dense, key_start = kv_gather(kv_cache, metadata.block_table, on_device, lengths)
        return (dense[0], dense[1]), key_start


def _can_be_copied(part: torch.Tensor) -> bool:
    """Whether a token's heads lie side by side, and its first one where the copy engine can go."""
    dim, size = part.shape[-1], part.element_size()
    if part.dim() == 3 and part.stride(1) != dim:
        return False
    row = part.stride(0) if part.dim() == 3 else part.shape[1] * dim
    return part.data_ptr() % BOX_ALIGNMENT_BYTES == 0 and row * size % BOX_ALIGNMENT_BYTES == 0
