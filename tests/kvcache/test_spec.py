"""From bytes to blocks."""

import pytest

from nanoserve.errors import ConfigError
from nanoserve.kvcache.spec import FullAttentionSpec, make_kv_cache_config

SPEC = FullAttentionSpec(block_size=16, num_kv_heads=2, head_dim=8, dtype_bytes=4)


def test_bytes_to_blocks():
    assert SPEC.page_size_bytes == 2 * 16 * 2 * 8 * 4
    config = make_kv_cache_config([SPEC] * 3, 3 * SPEC.page_size_bytes * 10 + 5, max_model_len=144)
    assert config.num_blocks == 10
    assert [group.layers for group in config.groups] == [(0, 1, 2)]
    assert config.num_usable_tokens == 144


def test_a_pool_that_cannot_hold_one_full_request_is_refused_with_both_counts():
    with pytest.raises(ConfigError, match=r"holds 144 tokens.*max_model_len = 145"):
        make_kv_cache_config([SPEC] * 3, 3 * SPEC.page_size_bytes * 10, max_model_len=145)


def test_several_groups_share_the_tokens():
    other = FullAttentionSpec(block_size=16, num_kv_heads=1, head_dim=16, dtype_bytes=4)
    config = make_kv_cache_config([SPEC, other, SPEC], 0, max_model_len=64, num_blocks=10)
    assert [group.layers for group in config.groups] == [(0, 2), (1,)]
    assert config.num_usable_tokens == 64
    with pytest.raises(ConfigError, match="holds 64 tokens"):
        make_kv_cache_config([SPEC, other], 0, max_model_len=65, num_blocks=10)


def test_a_tiny_model_does_not_turn_gigabytes_into_millions_of_blocks():
    config = make_kv_cache_config([SPEC], 4 * 2**30, max_model_len=144, max_num_seqs=8)
    assert config.num_blocks == 1 + 4 * 8 * SPEC.blocks_for(144)
    roomy = make_kv_cache_config([SPEC], SPEC.page_size_bytes * 20, 144, max_num_seqs=8)
    assert roomy.num_blocks == 20
