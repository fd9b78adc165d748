"""One block of the KV cache, and the queue of those that nobody uses.

A block is a number (its place in the cache tensors) with a reference count and, once its tokens are
final, a hash that names its contents. Free blocks are linked through fields of their own, so that
taking one out of the middle, which a prefix cache hit does, costs the same as taking the first.
This module must not know requests or what a hash is made of.
"""

from collections.abc import Iterable, Sequence

# What names a block's contents: the hash of its tokens and all before them, and the KV cache group
# that they were computed for (the same tokens leave different data in different groups).
BlockHash = bytes
GroupedBlockHash = tuple[BlockHash, int]


class KVCacheBlock:
    """One block.

    Attributes:
        block_id: its index in every layer's cache tensor.
        ref_cnt: block tables that hold it; 0 means it stands in the free queue.
        block_hash: the name of its contents while it can be found by it, else None.
        is_null: True for block 0, the placeholder that is never written and never counted.
        prev_free, next_free: its neighbours in the free queue; None while it is not in there.
    """

    __slots__ = ("block_hash", "block_id", "is_null", "next_free", "prev_free", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_cnt = 0
        self.block_hash: GroupedBlockHash | None = None
        self.is_null = False
        self.prev_free: KVCacheBlock | None = None
        self.next_free: KVCacheBlock | None = None

    def __repr__(self) -> str:
        # Neighbours by number only: following the links would print the whole queue.
        hashed = "" if self.block_hash is None else f", hash={self.block_hash[0].hex()[:8]}"
        return f"KVCacheBlock({self.block_id}, ref_cnt={self.ref_cnt}{hashed})"


class FreeKVCacheBlockQueue:
    """Free blocks in the order in which they will be handed out.

    A doubly linked list through the blocks themselves, with a fake block at each end so that no
    operation has a special case there. `popleft`, `remove`, `append` and their n-fold forms touch
    only the blocks they move: nothing depends on how many are free. A `deque` would have to search
    for a block in the middle. The design is vLLM's.

    Args:
        blocks: the blocks that are free at the start, first to be handed out first.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._head = KVCacheBlock(-1)
        self._tail = KVCacheBlock(-1)
        self._head.next_free = self._tail
        self._tail.prev_free = self._head
        self.num_free_blocks = 0
        self.append_n(blocks)

    def popleft(self) -> KVCacheBlock:
        """Take out the first block. Raises ValueError when none is left."""
        block = self._head.next_free
        if block is self._tail or block is None:
            raise ValueError("no free blocks")
        self.remove(block)
        return block

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        """Take out the first n blocks, in order. Raises ValueError if fewer are left."""
        if n > self.num_free_blocks:
            raise ValueError(f"{n} blocks wanted, {self.num_free_blocks} free")
        taken: list[KVCacheBlock] = []
        block = self._head.next_free
        for _ in range(n):
            assert block is not None
            taken.append(block)
            following = block.next_free
            block.prev_free = block.next_free = None
            block = following
        assert block is not None
        self._head.next_free = block
        block.prev_free = self._head
        self.num_free_blocks -= n
        return taken

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block out, wherever it stands. Raises ValueError if it is not in the queue."""
        before, after = block.prev_free, block.next_free
        if before is None or after is None:
            raise ValueError(f"{block} is not in the free queue")
        before.next_free = after
        after.prev_free = before
        block.prev_free = block.next_free = None
        self.num_free_blocks -= 1

    def append(self, block: KVCacheBlock) -> None:
        """Put a block at the end: it is handed out last."""
        self.append_n((block,))

    def append_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the end, in the order given."""
        last = self._tail.prev_free
        assert last is not None
        self._insert_after(last, blocks)

    def prepend_n(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Put blocks at the front; the first of them is handed out next."""
        self._insert_after(self._head, blocks)

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """Every free block in order, to look at: the one operation whose cost grows with them."""
        found: list[KVCacheBlock] = []
        block = self._head.next_free
        while block is not None and block is not self._tail:
            found.append(block)
            block = block.next_free
        return found

    def _insert_after(self, place: KVCacheBlock, blocks: Iterable[KVCacheBlock]) -> None:
        following = place.next_free
        assert following is not None
        for block in blocks:
            block.prev_free = place
            place.next_free = block
            place = block
            self.num_free_blocks += 1
        place.next_free = following
        following.prev_free = place
