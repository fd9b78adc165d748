"""`SamplingParams`: every value out of range is refused when it is made, by its field's name."""

import math

import pytest

from nanoserve import SamplingParams
from nanoserve.errors import InvalidRequestError

BAD = [
    ("n", [0, -1, 129, 10**6, 1.0, True]),  # A87
    ("temperature", [-0.1, math.nan, math.inf, "1", None]),
    ("top_p", [0.0, -0.5, 1.01, math.nan]),
    ("top_k", [-2, 2**31, 1.5]),
    ("min_p", [-0.1, 1.1, math.nan]),
    ("seed", [2**63, -(2**63) - 1, 1.5, "7"]),
    ("max_tokens", [0, -5, 10**12, 2.0]),  # A94
    ("min_tokens", [-1, 17]),
    ("stop", [[""], 3, ["a", 5], ["a"] * 17, ["\ud800"]]),  # A43
    ("stop_token_ids", [[-1], [2**31], ["a"]]),
    ("logprobs", [-1, 21, 1.0]),
]


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD for value in values]
)
def test_A87_A94_a_value_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InvalidRequestError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.param == name
    assert caught.value.status == 400


def test_A43_stop_takes_a_string_a_list_or_nothing():
    assert SamplingParams(stop="x").stop == ["x"]
    assert SamplingParams(stop=["a", "b"]).stop == ["a", "b"]
    assert SamplingParams(stop=None).stop == SamplingParams(stop=[]).stop == []


def test_stop_strings_need_text():
    with pytest.raises(InvalidRequestError, match="detokenize"):
        SamplingParams(stop="x", detokenize=False)


def test_greedy_below_the_threshold_only():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-6).greedy
    assert not SamplingParams(temperature=1e-4).greedy


def test_a_childs_seed_is_its_parents_plus_its_index():
    parent = SamplingParams(n=3, seed=40, stop=["a"])
    children = [parent.child(index) for index in range(3)]
    assert [child.seed for child in children] == [40, 41, 42]
    assert all(child.n == 1 for child in children)
    children[0].stop.append("b")
    assert parent.stop == ["a"]


def test_the_largest_seed_has_room_for_the_last_child():
    assert SamplingParams(seed=2**63 - 128, n=128).child(127).seed == 2**63 - 1
    with pytest.raises(InvalidRequestError, match="seed must be between"):
        SamplingParams(seed=2**63 - 127, n=128)
