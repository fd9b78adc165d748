"""Beam search against transformers' own, and against trying every continuation there is."""

import itertools

import pytest
import torch
from nanofixtures.tiny import make_tiny
from transformers import AutoModelForCausalLM

from nanoserve import LLM
from nanoserve.beam_search import BeamSearchParams
from nanoserve.errors import InvalidRequestError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("beams"))


@pytest.fixture(scope="module")
def llm(folder):
    with LLM(str(folder), dtype="float32", max_num_seqs=64, block_size=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def oracle(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


PROMPTS = [[5, 17, 3, 42], [9, 9, 1], list(range(20, 31))]


@pytest.mark.parametrize("width", [1, 2, 4, 10])
@pytest.mark.parametrize("penalty", [1.0, 0.0, 2.0])
def test_the_beams_are_those_of_transformers(llm, oracle, width, penalty):
    params = BeamSearchParams(width, 6, ignore_eos=True, length_penalty=penalty)
    found = llm.beam_search([list(prompt) for prompt in PROMPTS], params)
    for prompt, output in zip(PROMPTS, found, strict=True):
        with torch.inference_mode():
            expected = oracle.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                num_beams=width,
                num_return_sequences=width,
                max_new_tokens=6,
                min_new_tokens=6,
                do_sample=False,
                length_penalty=penalty,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert [sequence.tokens for sequence in output.sequences] == expected.tolist()
        assert all(sequence.finish_reason == "length" for sequence in output.sequences)


def log_probability(oracle, prompt, continuation):
    ids = torch.tensor([[*prompt, *continuation]])
    with torch.inference_mode():
        logits = oracle(ids).logits[0].double().log_softmax(-1)
    places = range(len(prompt) - 1, ids.shape[1] - 1)
    return sum(float(logits[p, t]) for p, t in zip(places, continuation, strict=True))


def test_a_wide_beam_finds_the_best_of_all_pairs(llm, oracle):
    prompt = PROMPTS[0]
    vocab = oracle.config.vocab_size
    params = BeamSearchParams(10, 2, ignore_eos=True)
    best = llm.beam_search(list(prompt), params)[0].sequences[0]
    with torch.inference_mode():
        first = oracle(torch.tensor([prompt])).logits[0, -1].double().log_softmax(-1)
        ids = torch.tensor([[*prompt, token] for token in range(vocab)])
        second = oracle(ids).logits[:, -1].double().log_softmax(-1)
    total = first[:, None] + second
    token, following = divmod(int(total.argmax()), vocab)
    assert best.tokens == [*prompt, token, following]
    assert best.cum_logprob == pytest.approx(float(total.max()), abs=1e-4)


@pytest.mark.parametrize("kept", [False, True])
def test_sequences_that_end_are_ranked_with_the_others(llm, oracle, kept, monkeypatch):
    prompt = PROMPTS[1]
    likeliest = llm.beam_search(list(prompt), BeamSearchParams(3, 1, ignore_eos=True))
    end = likeliest[0].sequences[0].tokens[-1]
    monkeypatch.setattr(llm._input_processor, "eos_token_ids", [end])
    params = BeamSearchParams(3, 3, include_stop_str_in_output=kept)
    found = llm.beam_search(list(prompt), params)[0].sequences
    assert any(sequence.finish_reason == "stop" for sequence in found)
    scores = []
    for sequence in found:
        continuation = sequence.tokens[len(prompt) :]
        if sequence.finish_reason == "stop" and not kept:
            continuation = [*continuation, end]
        assert end not in continuation[:-1]
        total = log_probability(oracle, prompt, continuation)
        assert sequence.cum_logprob == pytest.approx(total, abs=1e-4)
        scores.append(total / len(continuation))
    assert scores == sorted(scores, reverse=True)


def test_a_search_stops_at_the_models_length(llm):
    length = llm.max_model_len
    prompt = list(itertools.islice(itertools.cycle(range(1, 50)), length - 2))
    found = llm.beam_search(prompt, BeamSearchParams(2, 50, ignore_eos=True))[0].sequences
    assert [len(sequence.tokens) for sequence in found] == [length, length]


def test_every_block_is_free_afterwards(llm):
    llm.beam_search([[1, 2, 3]], BeamSearchParams(4, 3))
    assert not llm.core.scheduler.has_unfinished_requests()
    assert llm.core.scheduler.kv_cache_manager.usage == 0


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ((0, 5), "beam_width"),
        ((11, 5), "beam_width"),
        ((2, 0), "max_tokens"),
        ((True, 5), "beam_width"),
    ],
)
def test_limits_are_refused_by_name(arguments, param):
    with pytest.raises(InvalidRequestError) as error:
        BeamSearchParams(*arguments)
    assert error.value.param == param


def test_a_prompt_that_cannot_be_served_is_refused(llm):
    with pytest.raises(InvalidRequestError, match="not in the vocabulary"):
        llm.beam_search([[1, 10**6]], BeamSearchParams(2, 2))
