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
        extra_keys: what else its KV depends on, or who may share it: salt, adapter, image.
    """
    # Lengths go in with the parts, so that no two lists of parts make the same bytes.
    data = bytearray(ROOT if parent is None else parent)
    data += len(token_ids).to_bytes(8, "little") + array("q", token_ids).tobytes()
    for key in extra_keys:
        part = key.encode("utf-8", "surrogatepass")
        data += len(part).to_bytes(8, "little") + part
    return function(bytes(data))


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
        self._group_ids = range(len(config.groups))
        self._function = hash_function(hash_name)

    def lookup(
        self, request: "Request", max_num_tokens: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest known prefix, in whole blocks, of at most max_num_tokens tokens."""
        found: tuple[list[KVCacheBlock], ...] = tuple([] for _ in self._group_ids)
        if request.sampling_params.skip_reading_prefix_cache:
            return found, 0
        num_blocks = max_num_tokens // self._block_size
        for name in self._names(request, num_blocks):
            blocks = self._pool.get_cached_block(name, self._group_ids)
            if blocks is None:
                break
            for group, block in zip(found, blocks, strict=True):
                group.append(block)
        return found, len(found[0]) * self._block_size

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
                    # Every later name rests on the first one's, and with it on these.
                    () if names else request.extra_keys,
                )
            )
        return names[:num_blocks]
