"""Prefix caching: a full block is found again by the hash of all that precedes it.

A block's name is the hash of its parent's name, its own tokens and whatever else its KV depends on.
Equal names therefore mean equal beginnings, whole and in order, and the longest known prefix is a
walk down the chain until a name is unknown. Source: vLLM's automatic prefix caching. This module
must not hand out, take or free blocks: it only names them and finds them.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from nanoserve.errors import ConfigError
from nanoserve.kvcache.block import BlockHash, KVCacheBlock
from nanoserve.kvcache.block_pool import BlockPool
from nanoserve.kvcache.spec import KVCacheConfig

if TYPE_CHECKING:
    from nanoserve.request import Request

HashFunction = Callable[[bytes], bytes]

ROOT = b"nanoserve"
"""What stands where the first block has no parent. It is the same in every process, so that blocks
can be found by name across engines; who shares with whom is the salt's business."""


def sha256(data: bytes) -> bytes:
    """The default: nobody can make two prefixes that answer to one name."""
    return hashlib.sha256(data).digest()


def xxhash(data: bytes) -> bytes:
    """Faster, and not safe against somebody who looks for collisions: for trusted users only."""
    import xxhash as library

    return bytes(library.xxh3_128_digest(data))


HASH_FUNCTIONS: dict[str, HashFunction] = {"sha256": sha256, "xxhash": xxhash}


def hash_function(name: str) -> HashFunction:
    """A hash function by its name.

    Raises:
        ConfigError: the name is unknown, or its package is not installed.
    """
    if name not in HASH_FUNCTIONS:
        known = ", ".join(HASH_FUNCTIONS)
        raise ConfigError(f"unknown prefix_caching_hash_algo {name!r}; known: {known}")
    function = HASH_FUNCTIONS[name]
    try:
        function(b"")
    except ImportError as error:
        raise ConfigError(
            f"prefix_caching_hash_algo {name!r} needs the package {name}: pip install {name}"
        ) from error
    return function


def hash_block(
    function: HashFunction,
    parent: BlockHash | None,
    token_ids: Sequence[int],
    extra_keys: Sequence[str] = (),
) -> BlockHash:
    """The name of one full block.

    Args:
        function: the hash function.
        parent: the name of the block before it; None for the first.
        token_ids: its tokens.
        extra_keys: what else its KV depends on, or who may share it; see `extra_keys_of`.
    """
    # Lengths go in with the parts, so that no two lists of parts make the same bytes.
    data = bytearray(ROOT if parent is None else parent)
    data += len(token_ids).to_bytes(8, "little") + array("q", token_ids).tobytes()
    for key in extra_keys:
        part = key.encode("utf-8", "surrogatepass")
        data += len(part).to_bytes(8, "little") + part
    return function(bytes(data))


def extra_keys_of(request: "Request", start: int, end: int) -> tuple[str, ...]:
    """What names the block of tokens start to end - 1 beside its tokens and its parent.

    Adapter and salt stand in the first block alone: every later name rests on its. Media items are
    told apart only by these keys, since their tokens are all alike; where in the block one begins
    is part of the key, because a block may hold the end of one and the beginning of another.
    """
    media = [
        f"media:{item.offset - start}:{item.identifier}"
        for item in request.media
        if item.offset < end and start < item.offset + item.length
    ]
    return (*(request.extra_keys if start == 0 else ()), *media)


class PrefixCache:
    """The prefix index over the pool's map of hashes; see `nanoserve.kvcache.prefix_index`.

    Args:
        pool: where named blocks are kept.
        config: the KV cache groups; all have one block size.
        hash_name: one of `HASH_FUNCTIONS`.

    Raises:
        ConfigError: the hash function is not to be had.
    """

    def __init__(self, pool: BlockPool, config: KVCacheConfig, hash_name: str = "sha256") -> None:
        self._pool = pool
        self._block_size = config.block_size
        assert all(group.spec.block_size == self._block_size for group in config.groups)
        self._specs = [group.spec for group in config.groups]
        self._function = hash_function(hash_name)

    def lookup(
        self, request: "Request", max_num_tokens: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest known prefix, in whole blocks, of at most max_num_tokens tokens.

        It has to serve every group, and what one group lacks shortens it for all. That may leave a
        window over blocks that are gone, so the groups are asked until none shortens it further.
        """
        found: list[list[KVCacheBlock]] = [[] for _ in self._specs]
        if request.sampling_params.skip_reading_prefix_cache:
            return tuple(found), 0
        num_blocks = max_num_tokens // self._block_size
        names = self._names(request, num_blocks)
        agreed = False
        while not agreed:
            for group_id in range(len(found)):
                found[group_id] = self._find(group_id, names[:num_blocks])
                num_blocks = len(found[group_id])
            agreed = all(len(blocks) == num_blocks for blocks in found)
        return tuple(found), num_blocks * self._block_size

    def _find(self, group_id: int, names: list[BlockHash]) -> list[KVCacheBlock]:
        """The longest prefix that one group can serve; null blocks where nobody will read."""
        spec, group_ids = self._specs[group_id], [group_id]
        blocks: list[KVCacheBlock] = []
        if not spec.num_skipped_blocks(len(names) * self._block_size):
            # Everything is read: from the left, up to the first name that is not known.
            for name in names:
                found = self._pool.get_cached_block(name, group_ids)
                if found is None:
                    break
                blocks += found
            return blocks
        # Only the end is read: from the right, and anew from the left of each that is missing.
        end = index = len(names)
        while index > spec.num_skipped_blocks(end * self._block_size):
            index -= 1
            found = self._pool.get_cached_block(names[index], group_ids)
            if found is None:
                end, blocks = index, []
            else:
                blocks += found
        return [self._pool.null_block] * index + blocks[::-1]

    def blocks_filled(
        self, request: "Request", group_id: int, blocks: list[KVCacheBlock], start: int, end: int
    ) -> None:
        """Name the blocks `blocks[start:end]`."""
        names = self._names(request, end)
        for block, name in zip(blocks[start:end], names[start:end], strict=True):
            if not block.is_null:
                self._pool.cache_block(block, name, group_id)

    def _names(self, request: "Request", num_blocks: int) -> list[BlockHash]:
        """The names of a request's first blocks. Each is worked out once in the request's life."""
        names = request.block_hashes
        size = self._block_size
        while len(names) < num_blocks:
            start = len(names) * size
            names.append(
                hash_block(
                    self._function,
                    names[-1] if names else None,
                    request.token_ids[start : start + size],
                    extra_keys_of(request, start, start + size),
                )
            )
        return names[:num_blocks]
