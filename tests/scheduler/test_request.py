"""Stop checks and the rule of admission."""

import pytest
from nanofixtures.scheduling import make_request

from nanoserve.engine.messages import EngineCoreRequest, FinishReason
from nanoserve.errors import InvalidRequestError
from nanoserve.request import Request, RequestStatus, check_admissible
from nanoserve.sampling_params import SamplingParams

EOS, EOS2, STOP = 90, 91, 95


def run(tokens, prompt=4, max_model_len=100, **params):
    request = make_request("a", prompt, eos=[EOS, EOS2], **params)
    kept = request.append_output_tokens(tokens, max_model_len)
    return request, kept


@pytest.mark.parametrize(
    ("params", "tokens", "kept", "reason", "stop_reason"),
    [
        ({}, [1, EOS, 2, 3], 2, FinishReason.STOP, None),
        ({}, [1, EOS2, 2], 2, FinishReason.STOP, None),
        ({"ignore_eos": True}, [1, EOS, 2], 3, None, None),
        ({"stop_token_ids": [STOP]}, [1, STOP, 2], 2, FinishReason.STOP, STOP),
        # An end token that is a stop token too is the end of the sequence first.
        ({"stop_token_ids": [EOS]}, [EOS], 1, FinishReason.STOP, None),
        ({"stop_token_ids": [EOS], "ignore_eos": True}, [EOS], 1, FinishReason.STOP, EOS),
        ({"max_tokens": 2}, [1, 2, 3], 2, FinishReason.LENGTH, None),
        ({"max_tokens": 2}, [1, EOS, 3], 2, FinishReason.STOP, None),
        ({"max_tokens": None}, [1, 2, 3], 3, None, None),
    ],
)
def test_T40_SC10_stops_and_what_follows_is_dropped(params, tokens, kept, reason, stop_reason):
    request, got = run(tokens, **params)
    assert got == tokens[:kept]
    assert request.output_token_ids == tokens[:kept]
    assert request.status.finish_reason == reason
    assert request.is_finished == (reason is not None)
    assert request.stop_reason == stop_reason


def test_T41_min_tokens_holds_back_end_and_stop_tokens_but_not_the_length():
    request, kept = run([EOS, STOP, EOS2, EOS], min_tokens=4, stop_token_ids=[STOP])
    assert len(kept) == 4
    assert request.status == RequestStatus.FINISHED_STOPPED
    request, kept = run([EOS] * 9, min_tokens=8, max_tokens=8, prompt=4, max_model_len=10)
    assert len(kept) == 6
    assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED


@pytest.mark.parametrize(("prompt", "kept"), [(9, 1), (8, 2), (1, 9)])
def test_SC13_the_models_length_ends_a_request(prompt, kept):
    request, got = run([1] * 20, prompt=prompt, max_model_len=10, max_tokens=None)
    assert len(got) == kept
    assert request.num_tokens == 10
    assert request.status.finish_reason == FinishReason.LENGTH


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "limit", "usable", "message", "param"),
    [
        (0, 1, 10, 10, "empty", "prompt"),
        (10, 1, 10, 10, r"10 tokens.*maximum context length is 10", "prompt"),
        (10, None, 10, 10, r"10 tokens.*maximum context length is 10", "prompt"),
        (40, 1, 100, 28, r"40 tokens.*holds 28", "prompt"),
        (9, 2, 10, 10, r"length is 10 tokens.*11 were asked for: 9 in.*2 in", "max_tokens"),
        (20, 10, 100, 28, r"holds 28.*30 were asked for: 20 in.*10 in", "max_tokens"),
    ],
)
def test_A45_A55_what_can_never_be_served_is_refused_with_counts(
    prompt, max_tokens, limit, usable, message, param
):
    with pytest.raises(InvalidRequestError, match=message) as caught:
        check_admissible(prompt, max_tokens, limit, usable)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "limit", "usable"),
    [(9, 1, 10, 10), (9, None, 10, 9), (20, 9, 100, 28), (28, None, 100, 28), (1, 1, 2, 1)],
)
def test_A46_what_just_fits_is_let_in(prompt, max_tokens, limit, usable):
    check_admissible(prompt, max_tokens, limit, usable)


def test_from_engine_core_request_shares_nothing_that_grows():
    message = EngineCoreRequest("a", [1, 2], SamplingParams(), 7, [EOS], 1.5, 3)
    request = Request.from_engine_core_request(message)
    request.append_output_tokens([5], 100)
    assert message.prompt_token_ids == [1, 2]
    assert (request.seed, request.arrival_time, request.priority) == (7, 1.5, 3)
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (3, 2, 1)
    assert "a, WAITING, computed 0/3" in repr(request)
