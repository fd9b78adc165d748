"""One block table a request: which blocks of the pool hold its tokens, in order, for each KV group.

The scheduler asks for room before every step and gives it back when a request ends or is preempted.
An answer is all or nothing. Tables only grow and their entries stay, save those that nobody reads
any more because they lie before a sliding window: whoever holds a copy, such as the worker, needs
to be told only what was added. This module must not know policies, budgets or the worker.
"""

from typing import TYPE_CHECKING

from nanoserve.kvcache.block import KVCacheBlock
from nanoserve.kvcache.block_pool import BlockPool
from nanoserve.kvcache.prefix_index import NullPrefixIndex, PrefixIndexFactory
from nanoserve.kvcache.spec import KVCacheConfig

if TYPE_CHECKING:
    from nanoserve.request import Request

GroupBlocks = tuple[list[KVCacheBlock], ...]


class _BlockTable:
    """A request's blocks, one list a group.

    `num_slots` is the number of tokens they have room for; `num_filled` counts, for each group, the
    blocks that the prefix index has been told of.
    """

    __slots__ = ("blocks", "num_filled", "num_slots")

    def __init__(self, blocks: GroupBlocks, num_filled: list[int]) -> None:
        self.blocks = blocks
        self.num_filled = num_filled
        self.num_slots = 0


class KVCacheManager:
    """Block tables of all requests over one pool.

    Args:
        config: the groups, and the number of blocks they share.
        prefix_index: makes the prefix index once the pool exists; None caches no prefixes.
    """

    def __init__(
        self, config: KVCacheConfig, prefix_index: PrefixIndexFactory | None = None
    ) -> None:
        self.config = config
        self.block_pool = BlockPool(config.num_blocks)
        self.prefix_index = (prefix_index or NullPrefixIndex)(self.block_pool, config)
        self.enable_caching = not isinstance(self.prefix_index, NullPrefixIndex)
        self._specs = [group.spec for group in config.groups]
        self._tables: dict[str, _BlockTable] = {}
        self._block_copies: list[tuple[int, int]] = []
        self._no_blocks: GroupBlocks = tuple([] for _ in self._specs)

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return self.block_pool.usage

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return self.block_pool.num_free_blocks

    @property
    def num_requests(self) -> int:
        """Requests that hold blocks."""
        return len(self._tables)

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of num_tokens tokens takes, over all groups."""
        return sum(spec.blocks_for(num_tokens) for spec in self._specs)

    def fits_empty_pool(self, num_tokens: int) -> bool:
        """Whether one sequence of num_tokens tokens would fit if it had the pool to itself."""
        return self.num_blocks_for(num_tokens) <= self.block_pool.num_usable_blocks

    def get_computed_blocks(self, request: "Request") -> tuple[GroupBlocks, int]:
        """Blocks that already hold the beginning of the request's tokens.

        Ask at every attempt to admit the request and pass the answer on to `allocate_slots` before
        anything else is allocated: it holds no references, so it is worth nothing later.

        Returns:
            The blocks, one list a group, and how many tokens they hold (whole blocks, never all of
            the request's tokens).
        """
        blocks, num_tokens = self.prefix_index.lookup(request, request.num_tokens - 1)
        assert num_tokens < request.num_tokens, "the last token must be computed, for its logits"
        return blocks, num_tokens

    def allocate_slots(
        self,
        request: "Request",
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: GroupBlocks | None = None,
        num_lookahead_tokens: int = 0,
        must_fit_tokens: int = 0,
    ) -> GroupBlocks | None:
        """Make room for a request's next tokens, or change nothing.

        Args:
            request: `num_computed_tokens` of its tokens have their KV in its blocks already.
            num_new_tokens: tokens to be computed next.
            num_new_computed_tokens: tokens whose KV is found rather than computed: those of
                `new_computed_blocks`, and any that will be brought from outside.
            new_computed_blocks: what `get_computed_blocks` has just found.
            num_lookahead_tokens: further slots for tokens that are not known yet (drafts).
            must_fit_tokens: say no unless this many tokens of the request would fit, though only
                what is asked for is given. A demand beyond the whole pool counts as the whole pool.

        Returns:
            The blocks that were added after the computed ones, one list a group, or None.
        """
        num_slots = (
            request.num_computed_tokens
            + num_new_computed_tokens
            + num_new_tokens
            + num_lookahead_tokens
        )
        table = self._tables.get(request.request_id)
        if table is not None:
            self._free_skipped_blocks(request, table)
            if num_slots <= table.num_slots and not num_new_computed_tokens:
                return self._no_blocks
        hits = new_computed_blocks or self._no_blocks
        held = [
            len(hits[group_id]) + (0 if table is None else len(table.blocks[group_id]))
            for group_id in range(len(self._specs))
        ]
        needed = self._missing_blocks(num_slots, held)
        num_needed = sum(needed)
        if must_fit_tokens > num_slots:
            whole = min(self.num_blocks_for(must_fit_tokens), self.block_pool.num_usable_blocks)
            num_needed = max(num_needed, whole - sum(held))
        # A hit on a free block takes it out of the free queue: it is capacity like a new one.
        num_free_hits = sum(not b.ref_cnt and not b.is_null for group in hits for b in group)
        if num_needed > self.block_pool.num_free_blocks - num_free_hits:
            return None
        if table is None:
            empty: GroupBlocks = tuple([] for _ in self._specs)
            table = self._tables[request.request_id] = _BlockTable(empty, [0] * len(self._specs))
        return self._extend(table, hits, needed)

    def _free_skipped_blocks(self, request: "Request", table: _BlockTable) -> None:
        """Put the null block where blocks lie wholly before a sliding window."""
        # Drafts that are still to be verified may be computed again: only known tokens count.
        num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
        null = self.block_pool.null_block
        for blocks, spec in zip(table.blocks, self._specs, strict=True):
            skipped = []
            for index in reversed(range(min(spec.num_skipped_blocks(num_tokens), len(blocks)))):
                if blocks[index].is_null:
                    break  # and so are all before it
                skipped.append(blocks[index])
                blocks[index] = null
            self.block_pool.free_blocks(skipped)

    def _missing_blocks(self, num_tokens: int, held: list[int]) -> list[int]:
        return [
            max(0, spec.blocks_for(num_tokens) - have)
            for spec, have in zip(self._specs, held, strict=True)
        ]

    def _extend(self, table: _BlockTable, hits: GroupBlocks, needed: list[int]) -> GroupBlocks:
        # Every hit is taken before anything is handed out: otherwise the first group's new blocks
        # could be the very blocks that were found for the second.
        for group_id, found in enumerate(hits):
            self.block_pool.touch(found)
            table.blocks[group_id].extend(found)
            table.num_filled[group_id] += len(found)
        added = tuple(self.block_pool.get_new_blocks(count) for count in needed)
        for blocks, new in zip(table.blocks, added, strict=True):
            blocks.extend(new)
        table.num_slots = min(
            len(blocks) * spec.block_size
            for blocks, spec in zip(table.blocks, self._specs, strict=True)
        )
        return added

    def cache_blocks(self, request: "Request", num_final_tokens: int) -> None:
        """Tell the prefix index of blocks that have become full.

        Call it when a step's results are in, never when the step is planned: a request may lose
        its place in a step, and a draft may be rejected, and a block named too early would then be
        found with the wrong contents.

        Args:
            request: the request.
            num_final_tokens: its first so many tokens are final and their KV is computed.
        """
        table = self._tables.get(request.request_id)
        if not self.enable_caching or table is None:
            return
        for group_id, spec in enumerate(self._specs):
            start, end = table.num_filled[group_id], num_final_tokens // spec.block_size
            if end > start:
                blocks = table.blocks[group_id]
                self.prefix_index.blocks_filled(request, group_id, blocks, start, end)
                table.num_filled[group_id] = end

    def can_fork(self, parent: "Request", num_tokens: int) -> bool:
        """Whether the parent still holds what follows its first num_tokens tokens would read."""
        blocks = self.get_blocks(parent.request_id)
        return all(
            not any(block.is_null for block in group[spec.num_skipped_blocks(num_tokens) :])
            for group, spec in zip(blocks, self._specs, strict=True)
        )

    def fork(self, parent: "Request", child: "Request", num_tokens: int) -> bool:
        """Give a request without blocks the parent's first num_tokens tokens, or change nothing.

        Full blocks are shared by reference. A block that is only partly filled will be written by
        both, so the child gets one of its own and the contents are copied before the next step
        (`take_block_copies`). Each then writes where it always will: no id changes later.

        Returns:
            False when the pool has no block left for the copy.
        """
        source = self._tables[parent.request_id]
        assert child.request_id not in self._tables
        assert num_tokens <= source.num_slots
        num_full = [num_tokens // spec.block_size for spec in self._specs]
        has_tail = [num_tokens % spec.block_size > 0 for spec in self._specs]
        if sum(has_tail) > self.num_free_blocks:
            return False
        shared = tuple(b[:n] for b, n in zip(source.blocks, num_full, strict=True))
        filled = [min(a, b) for a, b in zip(source.num_filled, num_full, strict=True)]
        table = self._tables[child.request_id] = _BlockTable(tuple([] for _ in self._specs), filled)
        tails = self._extend(table, shared, [int(tail) for tail in has_tail])
        table.num_filled = filled
        for group_id, new in enumerate(tails):
            for block in new:
                origin = source.blocks[group_id][num_full[group_id]]
                self._block_copies.append((origin.block_id, block.block_id))
        return True

    def take_block_copies(self) -> list[tuple[int, int]]:
        """(source, destination) ids to copy before the next step, in order. Each is given once."""
        copies, self._block_copies = self._block_copies, []
        return copies

    def free(self, request: "Request") -> None:
        """Take back a request's blocks, the last one first. A request without any is fine."""
        table = self._tables.pop(request.request_id, None)
        if table is not None:
            for blocks in table.blocks:
                self.block_pool.free_blocks(reversed(blocks))

    def get_blocks(self, request_id: str) -> GroupBlocks:
        """A request's blocks in order, one list a group; empty lists if it has none."""
        table = self._tables.get(request_id)
        return self._no_blocks if table is None else table.blocks

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """A request's block ids in order, one list a group."""
        return tuple([block.block_id for block in group] for group in self.get_blocks(request_id))

    def reset_prefix_cache(self) -> bool:
        """Forget every cached prefix, as new weights demand; False while blocks are in use."""
        return self.block_pool.reset_prefix_cache()
