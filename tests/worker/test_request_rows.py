"""Permanent rows: taken, kept, freed."""

import pytest
import torch

from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler_output import NewRequestData
from nanoserve.worker.request_rows import RequestRows

CPU = torch.device("cpu")


def new(name, tokens, params=None, seed=0, eos=(), prompt=None):
    return NewRequestData(
        request_id=name,
        token_ids=list(tokens),
        num_prompt_tokens=len(tokens) if prompt is None else prompt,
        sampling_params=params or SamplingParams(),
        seed=seed,
        block_ids=([],),
        num_computed_tokens=0,
        eos_token_ids=list(eos),
    )


def test_a_request_keeps_its_row_while_others_come_and_go():
    rows = RequestRows(3, 8, CPU)
    a, b = rows.add(new("a", [1, 2])), rows.add(new("b", [3]))
    assert rows.remove("a") == a
    c, d = rows.add(new("c", [4, 5, 6])), rows.add(new("d", [7]))
    assert len({b, c, d}) == 3
    assert rows.index == {"b": b, "c": c, "d": d}
    assert rows.gather(torch.tensor([b, c, c]), torch.tensor([0, 0, 2])).tolist() == [3, 4, 6]
    assert rows.remove("nobody") is None
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("request_data", "message"),
    [
        (new("a", [1]), "has a row already"),
        (new("x", [1] * 5), "5 tokens do not fit a row of 4"),
        (new("x", [2**40]), "overflow"),
    ],
)
def test_a_request_that_cannot_be_added_changes_nothing(request_data, message):
    rows = RequestRows(2, 4, CPU)
    rows.add(new("a", [1, 2]))
    before, version = rows.token_ids.clone(), rows.version
    with pytest.raises((ValueError, RuntimeError), match=message):
        rows.add(request_data)
    assert torch.equal(rows.token_ids, before)
    assert rows.index.keys() == {"a"}
    assert rows.version == version
    rows.add(new("b", [3]))
    with pytest.raises(ValueError, match="all 2 rows are taken"):
        rows.add(new("c", [3]))


def test_columns_hold_what_each_request_asked_for():
    rows = RequestRows(4, 4, CPU)
    asked = {
        "a": (SamplingParams(temperature=0.5, top_k=7), 11),
        "b": (SamplingParams(top_p=0.25, min_p=0.125), -(2**63)),
    }
    for name, (params, seed) in asked.items():
        row = rows.add(new(name, [1], params, seed))
        columns = rows.columns.select(torch.tensor([row]))
        assert columns.temperature.item() == params.temperature
        assert columns.top_k.item() == params.top_k
        assert columns.top_p.item() == params.top_p
        assert columns.min_p.item() == params.min_p
        assert columns.seed.item() == seed


def test_every_end_token_is_known_and_min_tokens_counts_from_the_prompt():
    rows = RequestRows(1, 16, CPU)
    params = SamplingParams(min_tokens=3, stop_token_ids=[9, 4])
    row = rows.add(new("a", [1, 2, 3, 4, 5], params, eos=[2, 4], prompt=4))
    state = rows.state(row)
    assert state.end_token_ids == [2, 4, 9]
    assert state.min_length == 7
    rows.remove("a")
    with pytest.raises(KeyError):
        rows.state(row)


def test_written_tokens_are_read_back():
    rows = RequestRows(2, 4, CPU)
    rows.add(new("a", [1]))
    rows.write(torch.tensor([0, 1]), torch.tensor([1, 3]), torch.tensor([50, 60]))
    assert rows.token_ids.tolist() == [[1, 50, 0, 0], [0, 0, 0, 60]]
