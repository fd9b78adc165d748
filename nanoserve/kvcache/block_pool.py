"""The pool: every block of the KV cache, who may have one, and which can be found by its contents.

It counts references, keeps the free queue, and keeps the map from hashes to blocks that a prefix
cache looks things up in. A block that is freed keeps its hash, and with it the chance to be found,
until it is handed out for something else. The pool must not know requests or how hashes are made.
"""

from collections.abc import Iterable, Sequence

from nanoserve.kvcache.block import (
    BlockHash,
    FreeKVCacheBlockQueue,
    GroupedBlockHash,
    KVCacheBlock,
)


class BlockPool:
    """All blocks of one KV cache.

    Block 0 is the null block: padding and positions that are no longer needed point at it. It is
    never handed out, freed, counted or hashed, so writing to it or losing it cannot hurt anyone.

    Args:
        num_blocks: blocks in the cache tensors, the null block included.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ValueError(
                f"a pool needs two blocks or more (block 0 is the null block): {num_blocks}"
            )
        self.num_blocks = num_blocks
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks[1:])
        # Two requests that compute the same tokens in the same step each fill a block of their own,
        # and a block table never changes an entry: one hash may name several blocks, here by id.
        self._cached: dict[GroupedBlockHash, dict[int, KVCacheBlock]] = {}

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that can be handed out when all are free."""
        return self.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds, cached ones included."""
        return self.free_block_queue.num_free_blocks

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their hash, in use or free."""
        return sum(len(blocks) for blocks in self._cached.values())

    @property
    def usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_usable_blocks

    def get_new_blocks(self, n: int) -> list[KVCacheBlock]:
        """Hand out n blocks, each with one reference and without a name.

        Only now is a block that was freed with its hash forgotten: until somebody needs the memory,
        what it holds may still be of use.

        Raises:
            ValueError: fewer than n are free; nothing has changed.
        """
        blocks = self.free_block_queue.popleft_n(n)
        for block in blocks:
            if block.block_hash is not None:
                self.evict_block(block)
            assert block.ref_cnt == 0
            block.ref_cnt = 1
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add a reference to each block; one that was free leaves the free queue."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Take a reference off each block; those without any left become free.

        A block without a hash holds nothing that could be found again and goes to the front of the
        queue; one with a hash goes to the back, so that the least recently used is evicted first.

        Args:
            ordered_blocks: the block to be reused first comes first. A request's blocks are given
                last to first, so that the end of a sequence goes before the prefix it rests on.
        """
        unhashed: list[KVCacheBlock] = []
        hashed: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            assert block.ref_cnt > 0, f"{block} is freed more often than it was taken"
            block.ref_cnt -= 1
            if block.ref_cnt == 0:
                (unhashed if block.block_hash is None else hashed).append(block)
        if unhashed:
            self.free_block_queue.prepend_n(unhashed)
        if hashed:
            self.free_block_queue.append_n(hashed)

    def get_cached_block(
        self, block_hash: BlockHash, group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        """A block with this hash for each group, or None if any group has none."""
        found: list[KVCacheBlock] = []
        for group_id in group_ids:
            blocks = self._cached.get((block_hash, group_id))
            if blocks is None:
                return None
            found.append(next(iter(blocks.values())))
        return found

    def cache_block(self, block: KVCacheBlock, block_hash: BlockHash, group_id: int) -> None:
        """Let a block be found by its hash. It must be in use, full, and its tokens final.

        A block that two requests share may be named by both, with the same hash.
        """
        assert block.ref_cnt > 0, f"{block} is not in use"
        assert block.block_hash in (None, (block_hash, group_id)), block
        block.block_hash = (block_hash, group_id)
        self._cached.setdefault(block.block_hash, {})[block.block_id] = block

    def evict_block(self, block: KVCacheBlock) -> bool:
        """Forget a block's hash, and only this block's; False if it had none."""
        if block.block_hash is None:
            return False
        blocks = self._cached[block.block_hash]
        del blocks[block.block_id]
        if not blocks:
            del self._cached[block.block_hash]
        block.block_hash = None
        return True

    def reset_prefix_cache(self) -> bool:
        """Forget every hash. Refused (False, nothing changed) while any block is in use."""
        if self.num_free_blocks != self.num_usable_blocks:
            return False
        self._cached.clear()
        for block in self.blocks:
            block.block_hash = None
        return True
