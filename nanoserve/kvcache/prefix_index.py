"""The seam of prefix caching: who is asked, at admission, which blocks hold a prompt's beginning.

The manager asks when it looks a request up and tells when blocks become full; an index answers from
the pool's map of hashes. The null index knows of nothing: an engine without prefix caching. An
index must not hand out, take or free blocks: the manager does, once it knows that all will fit.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from nanoserve.kvcache.block import KVCacheBlock
from nanoserve.kvcache.block_pool import BlockPool
from nanoserve.kvcache.spec import KVCacheConfig
from nanoserve.registry import Registry

if TYPE_CHECKING:
    from nanoserve.request import Request


class PrefixIndex(Protocol):
    """Finds blocks that already hold the KV of a request's first tokens."""

    def lookup(
        self, request: "Request", max_num_tokens: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """The longest known prefix, looked up anew at every attempt to admit the request.

        What was found before may have been evicted since, so no answer is ever kept. The index also
        decides whether this request may be answered from the cache at all.

        Args:
            request: `token_ids` are looked up; `block_hashes` is the index's to keep, so that a
                second look does not hash again.
            max_num_tokens: most tokens that may be found. It is less than the request has, because
                the last one has to be computed for the logits that follow it.

        Returns:
            The blocks, one list a KV cache group (a group that needs no old blocks has null blocks
            in their place), and the number of tokens they hold: whole blocks only.
        """
        ...

    def blocks_filled(
        self, request: "Request", group_id: int, blocks: list[KVCacheBlock], start: int, end: int
    ) -> None:
        """Blocks `blocks[start:end]` of the request's table in one group are full.

        Their tokens are final (no draft among them) and their KV has been computed. Each request
        tells of a block once. A block that requests share is told by each of them, and another
        block with the same contents may be known already; null blocks hold nothing: skip them.
        """
        ...


PrefixIndexFactory = Callable[[BlockPool, KVCacheConfig], PrefixIndex]

PREFIX_INDEXES = Registry(
    "prefix index",
    {
        "null": "nanoserve.kvcache.prefix_index:NullPrefixIndex",
        "hash": "nanoserve.kvcache.prefix_cache:PrefixCache",
    },
)


class NullPrefixIndex:
    """No prefix caching: finds nothing and remembers nothing."""

    def __init__(self, pool: BlockPool, config: KVCacheConfig) -> None:
        self._num_groups = len(config.groups)

    def lookup(
        self, request: "Request", max_num_tokens: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        """Nothing."""
        return tuple([] for _ in range(self._num_groups)), 0

    def blocks_filled(
        self, request: "Request", group_id: int, blocks: list[KVCacheBlock], start: int, end: int
    ) -> None:
        """Nothing to remember."""
