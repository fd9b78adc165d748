"""What kinds of KV cache a model has, and how many blocks a budget of bytes gives.

Layers whose cache looks alike form a group; every group draws its blocks from one pool, so a block
costs the same bytes in each. Full attention and sliding windows are the kinds so far; MLA latents
and recurrent states are further specs over the same pool. Plain arithmetic: no tensors here.
"""

from dataclasses import dataclass

from nanoserve.errors import ConfigError

# Blocks beyond what the running requests can fill keep prefixes of requests that have ended.
POOL_HEADROOM = 4


@dataclass(frozen=True)
class KVCacheSpec:
    """One layer's cache.

    Attributes:
        block_size: tokens a block holds.
        num_kv_heads, head_dim: shape of one token's keys (and values).
        dtype_bytes: bytes of one element.
    """

    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype_bytes: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block in one layer, keys and values together."""
        return 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype_bytes

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold num_tokens tokens."""
        return -(-num_tokens // self.block_size)

    def num_skipped_blocks(self, num_tokens: int) -> int:
        """Blocks at the start of num_tokens tokens that no token after those will read."""
        return 0


@dataclass(frozen=True)
class FullAttentionSpec(KVCacheSpec):
    """Keys and values of every past token are kept."""


@dataclass(frozen=True)
class SlidingWindowSpec(KVCacheSpec):
    """A token sees only the last `window` tokens, itself included; what is older can go."""

    window: int

    def num_skipped_blocks(self, num_tokens: int) -> int:
        """Whole blocks before the first token that the next one sees."""
        return max(0, num_tokens + 1 - self.window) // self.block_size


@dataclass(frozen=True)
class KVCacheGroup:
    """Layers that share one block table: the same spec, the same block ids in each."""

    layers: tuple[int, ...]
    spec: KVCacheSpec


@dataclass(frozen=True)
class KVCacheConfig:
    """The cache of one engine.

    Attributes:
        num_blocks: blocks in the pool, the null block (id 0) included.
        groups: the layers, sorted into groups.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]

    @property
    def block_size(self) -> int:
        """Tokens a block holds (one size for all groups so far)."""
        return self.groups[0].spec.block_size

    @property
    def num_usable_tokens(self) -> int:
        """Tokens that fit the pool when one sequence has it all: it takes blocks in every group."""
        return (self.num_blocks - 1) // len(self.groups) * self.block_size


def group_layers(specs: list[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Sort layers (in order) into groups of equal specs."""
    by_spec: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        by_spec.setdefault(spec, []).append(layer)
    return tuple(KVCacheGroup(tuple(layers), spec) for spec, layers in by_spec.items())


def make_kv_cache_config(
    specs: list[KVCacheSpec],
    available_bytes: int,
    max_model_len: int,
    num_blocks: int | None = None,
    max_num_seqs: int | None = None,
) -> KVCacheConfig:
    """From a budget of bytes to a number of blocks.

    Args:
        specs: one a layer, in layer order.
        available_bytes: what all layers' blocks may take together.
        max_model_len: a pool that cannot hold one request of this length is refused.
        num_blocks: overrides the budget (null block included).
        max_num_seqs: most requests that run at once; no more blocks are taken than
            POOL_HEADROOM times what so many full-length requests fill.

    Raises:
        ConfigError: when one full-length request does not fit; it says how many tokens do.
    """
    groups = group_layers(specs)
    bytes_per_block = sum(len(group.layers) * group.spec.page_size_bytes for group in groups)
    needed = sum(group.spec.blocks_for(max_model_len) for group in groups)
    if num_blocks is None:
        num_blocks = available_bytes // bytes_per_block
        if max_num_seqs is not None:
            # Every block costs a little on the host too: for a tiny model, a budget of gigabytes
            # would be millions of blocks that nothing can ever fill.
            num_blocks = min(num_blocks, 1 + POOL_HEADROOM * max_num_seqs * needed)
    if num_blocks < 2:
        raise ConfigError(
            f"{available_bytes / 2**20:.1f} MiB for the KV cache is less than two blocks of "
            f"{bytes_per_block / 2**20:.2f} MiB: give it more memory or a smaller block size"
        )
    config = KVCacheConfig(num_blocks, groups)
    if needed > num_blocks - 1:
        raise ConfigError(
            f"the KV cache holds {config.num_usable_tokens} tokens ({num_blocks} blocks of "
            f"{config.block_size}, one of them reserved), but one request may have max_model_len "
            f"= {max_model_len}: lower max_model_len to {config.num_usable_tokens} or give the "
            f"cache {(needed + 1) * bytes_per_block / 2**20:.1f} MiB"
        )
    return config
