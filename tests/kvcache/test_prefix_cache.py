"""The names of blocks, and what is found by them: against a plain reading of what a prefix is."""

import hashlib
import itertools
import random
import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nanofixtures.scheduling import check_manager, make_cache_config, make_request

from nanoserve.errors import ConfigError
from nanoserve.kvcache import prefix_cache
from nanoserve.kvcache.manager import KVCacheManager
from nanoserve.kvcache.prefix_cache import PrefixCache, hash_block, hash_function, sha256
from nanoserve.request import MediaItem, Request
from nanoserve.sampling_params import SamplingParams

SIZE = 4


def manager(num_blocks=32, num_groups=1):
    return KVCacheManager(make_cache_config(num_blocks, SIZE, num_groups), PrefixCache)


def compute(manager, request):
    """Admit a request, compute it, let its blocks be found; how many tokens were hits."""
    hits, num_hit = manager.get_computed_blocks(request)
    assert manager.allocate_slots(request, request.num_tokens - num_hit, num_hit, hits) is not None
    request.num_computed_tokens = request.num_tokens
    manager.cache_blocks(request, request.num_tokens)
    check_manager(manager)
    return num_hit


def common_prefix(a, b):
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))


@given(
    prompts=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=25), min_size=1, max_size=8),
    salts=st.lists(st.sampled_from([None, "a", "b"]), min_size=8, max_size=8),
    num_groups=st.sampled_from([1, 2]),
)
@settings(max_examples=200, deadline=None)
def test_a_hit_is_the_longest_prefix_that_was_computed_before(prompts, salts, num_groups):
    cache = manager(200, num_groups)
    before = []
    for number, prompt in enumerate(prompts):
        salt = salts[number]
        request = make_request(f"r{number}", prompt, cache_salt=salt)
        longest = max(
            [common_prefix(prompt, other) for other, its in before if its == salt], default=0
        )
        # Whole blocks, and never all of the prompt: its last token gives the logits.
        wanted = min(longest, len(prompt) - 1) // SIZE * SIZE
        assert compute(cache, request) == wanted
        before.append((prompt, salt))


def test_names_differ_wherever_anything_differs():
    rng = random.Random(0)
    seen = {}
    parents = [None, b"x" * 32, sha256(b"y")]
    for _ in range(3000):
        parent = rng.choice(parents)
        tokens = tuple(rng.randrange(3) for _ in range(rng.randrange(4)))
        extra = tuple(rng.choice(["", "a", "aa", "salt:a"]) for _ in range(rng.randrange(3)))
        key = (parent, tokens, extra)
        name = hash_block(sha256, parent, tokens, extra)
        assert seen.setdefault(name, key) == key
    assert len(seen) > 500


def test_extra_keys_cannot_be_read_in_two_ways():
    one = hash_block(sha256, None, [1], ["ab", "c"])
    other = hash_block(sha256, None, [1], ["a", "bc"])
    assert one != other


def test_the_same_tokens_after_another_beginning_are_not_found():
    cache = manager()
    compute(cache, make_request("a", [1] * 4 + [2] * 4 + [3]))
    assert compute(cache, make_request("b", [9] * 4 + [2] * 4 + [3])) == 0
    # Nor at another depth.
    assert compute(cache, make_request("c", [2] * 4 + [3])) == 0


def test_each_block_is_hashed_once_in_a_requests_life(monkeypatch):
    calls = []
    real = hash_block

    def counted(*arguments):
        calls.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(prefix_cache, "hash_block", counted)
    cache, request = manager(), make_request("a", 17)
    for _ in range(3):
        cache.get_computed_blocks(request)
    compute(cache, request)
    assert len(calls) == 4


def test_a_request_may_decline_to_read_but_still_leaves_its_blocks():
    cache = manager()
    prompt = list(range(10))
    compute(cache, make_request("a", prompt))
    assert compute(cache, make_request("b", prompt, skip_reading_prefix_cache=True)) == 0
    cache = manager()
    compute(cache, make_request("c", prompt, skip_reading_prefix_cache=True))
    assert compute(cache, make_request("d", prompt)) == 8


def test_a_hit_takes_its_block_out_of_the_free_queue_and_eviction_is_least_recent_first():
    cache = manager(num_blocks=7)
    old, new = make_request("old", [1] * 8 + [0]), make_request("new", [2] * 8 + [0])
    for request in (old, new):
        compute(cache, request)
        cache.free(request)
    pool = cache.block_pool
    assert pool.num_free_blocks == 6
    again = make_request("again", [1] * 8 + [5])
    assert compute(cache, again) == 8
    held = {block.block_id for block in cache.get_blocks("again")[0]}
    assert not held & {block.block_id for block in pool.free_block_queue.get_all_free_blocks()}
    # Three blocks are free of names or of use; the next need evicts `new`, its end first.
    compute(cache, make_request("more", [7] * 8))
    assert cache.get_computed_blocks(make_request("x", [2] * 8 + [0]))[1] == 4
    compute(cache, make_request("last", [8] * 4))
    assert cache.get_computed_blocks(make_request("y", [2] * 8 + [0]))[1] == 0


def test_a_found_block_that_has_gone_is_not_found_again():
    cache = manager(num_blocks=4)
    first = make_request("first", [1] * 8 + [0])
    compute(cache, first)
    cache.free(first)
    waiting = make_request("waiting", [1] * 8 + [5])
    assert cache.get_computed_blocks(waiting)[1] == 8
    other = make_request("other", [3] * 12)
    compute(cache, other)  # takes every block
    cache.free(other)
    assert cache.get_computed_blocks(waiting)[1] == 0


def test_reset_forgets_all_and_is_refused_while_blocks_are_in_use():
    cache, request = manager(), make_request("a", 9)
    compute(cache, request)
    assert cache.reset_prefix_cache() is False
    assert cache.get_computed_blocks(make_request("b", list(request.token_ids)))[1] == 8
    cache.free(request)
    assert cache.reset_prefix_cache() is True
    assert cache.get_computed_blocks(make_request("c", list(request.token_ids)))[1] == 0


def test_hash_functions_go_by_name():
    assert hash_function("sha256") is sha256
    with pytest.raises(ConfigError, match="unknown prefix_caching_hash_algo 'md4'; known: sha256"):
        hash_function("md4")


def test_a_hash_that_needs_a_package_says_which(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "xxhash", None)
    with pytest.raises(ConfigError, match="needs the package xxhash: pip install xxhash"):
        hash_function("xxhash")


def chain(tokens, keys_of_block):
    """The names of all full blocks as the format says: lengths go before tokens and before keys."""
    names, parent = [], b"nanoserve"
    for number in range(len(tokens) // SIZE):
        data = parent + struct.pack("<q", SIZE)
        data += struct.pack(f"<{SIZE}q", *tokens[number * SIZE : (number + 1) * SIZE])
        for key in keys_of_block(number):
            data += struct.pack("<q", len(key.encode())) + key.encode()
        parent = hashlib.sha256(data).digest()
        names.append(parent)
    return names


def full_request(name, prompt, **keys):
    return Request(name, prompt, SamplingParams(max_tokens=4), **keys)


def test_T06_T07_T09_names_are_the_chain_of_hashes_and_grow_with_the_request():
    cache = manager()
    request = full_request("a", list(range(11)), cache_salt="s", lora_name="l")
    compute(cache, request)
    wanted = chain(list(range(16)), lambda n: ["lora:l", "salt:s"] if n == 0 else [])
    assert request.block_hashes == wanted[:2]
    request.token_ids += range(11, 16)
    assert cache.allocate_slots(request, 5) is not None
    cache.cache_blocks(request, 15)
    assert request.block_hashes == wanted[:3]
    cache.cache_blocks(request, 16)
    assert request.block_hashes == wanted
    assert [block.block_hash for block in cache.get_blocks("a")[0]] == [(n, 0) for n in wanted]


def test_T20_T21_adapters_and_salts_share_nothing_and_are_not_taken_for_each_other():
    cache, prompt = manager(64), list(range(9))
    everyone = [
        {},
        {"cache_salt": "a"},
        {"cache_salt": "b"},
        {"lora_name": "a"},
        {"lora_name": "a", "cache_salt": "a"},
        {"cache_salt": "lora:a"},
    ]
    found = [
        [compute(cache, full_request(f"{turn}-{i}", prompt, **keys)) for turn in range(2)]
        for i, keys in enumerate(everyone)
    ]
    assert found == [[0, 8]] * len(everyone)


def test_T08_T19_media_are_told_apart_from_the_block_on_in_which_they_begin():
    cache, prompt = manager(64), [1, 2, 3, 4, 5, 5, 5, 5, 5, 6, 7, 8, 9]

    def found(name, *media):
        return compute(cache, full_request(name, prompt, media=media))

    assert found("cat", MediaItem("cat", 4, 5)) == 0
    assert found("cat again", MediaItem("cat", 4, 5)) == 12
    assert found("dog", MediaItem("dog", 4, 5)) == 4
    assert found("none") == 4
    # The same picture, begun one token later: other placeholders stand for other parts of it.
    assert found("shifted", MediaItem("cat", 5, 4)) == 4
    # Two in one block, in either order.
    assert found("two", MediaItem("cat", 4, 2), MediaItem("dog", 6, 3)) == 4
    assert found("two swapped", MediaItem("dog", 4, 2), MediaItem("cat", 6, 3)) == 4
    assert found("two again", MediaItem("cat", 4, 2), MediaItem("dog", 6, 3)) == 12


def test_A91_a_weak_hash_gives_away_foreign_blocks_and_the_default_is_not_weak(monkeypatch):
    prompts = [[i] * 8 + [0] for i in range(20)]
    for function, hits in ((sha256, 0), (lambda data: b"same", 8)):
        monkeypatch.setitem(prefix_cache.HASH_FUNCTIONS, "sha256", function)
        cache = manager(128)
        found = [compute(cache, make_request(f"r{i}", p)) for i, p in enumerate(prompts)]
        assert found == [0] + [hits] * 19


def test_T24_when_one_of_two_equal_blocks_goes_the_other_is_still_found():
    cache, prompt = manager(9), [3] * 9
    one, two = make_request("one", prompt), make_request("two", prompt)
    for request in (one, two):
        assert cache.allocate_slots(request, 9) is not None
    for request in (one, two):
        request.num_computed_tokens = 9
        cache.cache_blocks(request, 9)
    cache.free(one)
    # Five blocks take what is free, and with it the names of the first's two blocks.
    compute(cache, make_request("more", [7] * 20))
    assert cache.get_computed_blocks(make_request("x", prompt))[1] == 8
    check_manager(cache)
