"""The runner against a recording model: each tensor of each step is worked out again by hand."""

import numpy as np
import pytest
import torch
from nanofixtures.steps import GREEDY, VOCAB, Steps, engine_config, make_runner, next_token

from nanoserve.engine.connector import KVConnectorOutput, KVConnectorRole, NullConnector
from nanoserve.sampling_params import SamplingParams
from nanoserve.worker.runner import copy_blocks


@pytest.fixture
def steps():
    return Steps()


def follow(tokens, count):
    """What the recording model generates after these tokens."""
    known = list(tokens)
    for _ in range(count):
        last = torch.tensor(known[-1]), torch.tensor(len(known) - 1)
        known.append(int(next_token(*last)))
    return known[len(tokens) :]


def check_batch(batch, steps, counts, known, block_size=4):
    """Compare a recorded batch with numpy's account of the same step."""
    ids, positions, slots, start_loc, seq_lens, indices = [], [], [[], []], [0], [], []
    for name, count in counts.items():
        end = steps.computed[name]
        span = np.arange(end - count, end)
        positions += span.tolist()
        ids += [known[name][p] for p in span]
        for group, out in zip(steps.blocks[name], slots, strict=False):
            out += [group[p // block_size] * block_size + p % block_size for p in span]
        start_loc.append(start_loc[-1] + count)
        seq_lens.append(end)
        if end >= len(known[name]):
            indices.append(start_loc[-1] - 1)
    assert batch.input_ids.tolist() == ids
    assert batch.positions.tolist() == positions
    assert batch.logits_indices.tolist() == indices
    for group, metadata in enumerate(batch.attn):
        assert metadata.query_start_loc.tolist() == start_loc
        assert metadata.query_start_loc.dtype == torch.int32
        assert metadata.seq_lens.tolist() == metadata.seq_lens_cpu == seq_lens
        assert metadata.query_lens == list(counts.values())
        assert metadata.slot_mapping.tolist() == slots[group]
        width = -(-max(seq_lens) // block_size)
        for line, name in zip(metadata.block_table.tolist(), counts, strict=True):
            own = steps.blocks[name][group]
            assert line == own + [0] * (width - len(own))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_mixed_history_lays_out_every_batch_right(groups):
    runner, model = make_runner(groups=groups)
    steps = Steps(groups=groups)
    known = {"a": list(range(1, 11)), "b": [7], "c": [3, 1, 4, 1, 5], "d": [9] * 6}
    for name in ("a", "b"):
        steps.add(name, known[name])
    history = [
        {"a": 3, "b": 1},  # chunk + whole prompt
        {"b": 1, "a": 5},  # decode + chunk, in another order
        {"a": 2, "b": 1, "c": 5},
        {"c": 1, "b": 1, "a": 1},  # decodes only
        {"d": 4, "a": 1},
        {"d": 2, "a": 1, "c": 1},
    ]
    for number, counts in enumerate(history):
        for name in counts.keys() - steps.blocks.keys():
            steps.add(name, known[name])
        if number == 4:
            steps.finish("b")
        output = runner.execute(steps.step(counts))
        check_batch(model.batches[-1], steps, counts, known)
        sampling = [name for name in counts if steps.computed[name] == len(known[name])]
        assert list(output.sampled_token_ids) == sampling
        for name in sampling:
            expected = follow(known[name], 1)
            assert output.sampled_token_ids[name] == expected
            known[name] += expected
    assert len(model.batches) == len(history)
    assert len(runner.rows) == 3


def test_SC7_a_partial_prefill_samples_nothing(steps):
    runner, _ = make_runner()
    steps.add("a", range(10))
    assert runner.execute(steps.step({"a": 4})).sampled_token_ids == {}
    assert runner.execute(steps.step({"a": 5})).sampled_token_ids == {}
    assert runner.execute(steps.step({"a": 1})).sampled_token_ids == {"a": follow(range(10), 1)}


def test_a_request_with_a_cached_prefix_starts_in_the_middle():
    runner, model = make_runner()
    steps = Steps()
    steps.add("a", range(10))
    steps.blocks["a"] = ([40, 41],)
    steps.computed["a"] = 8
    step = steps.step({"a": 2})
    step.scheduled_new_reqs[0].block_ids = ([40, 41, *step.scheduled_new_reqs[0].block_ids[0]],)
    runner.execute(step)
    check_batch(model.batches[-1], steps, {"a": 2}, {"a": list(range(10))})


def test_a_preempted_request_comes_back_with_its_output_and_draws_the_same():
    params = SamplingParams(temperature=2.0, seed=5)
    prompt = [4, 2, 9]
    runner, _ = make_runner()
    steps = Steps()
    steps.add("a", prompt, params, seed=5)
    plain = list(runner.execute(steps.step({"a": 3})).sampled_token_ids["a"])
    for _ in range(8):
        plain += runner.execute(steps.step({"a": 1})).sampled_token_ids["a"]

    runner, _ = make_runner()
    steps = Steps(seed=1)
    steps.add("a", prompt, params, seed=5)
    steps.add("z", [1])
    again = list(runner.execute(steps.step({"z": 1, "a": 3})).sampled_token_ids["a"])
    for _ in range(3):
        again += runner.execute(steps.step({"a": 1})).sampled_token_ids["a"]
    runner.execute(steps.step({"z": 1}, preempted_req_ids={"a"}))
    assert runner.rows.index.keys() == {"z"}
    steps.add("a", prompt + again, params, seed=5, prompt=3)
    assert runner.execute(steps.step({"a": 4})).sampled_token_ids == {}
    again += runner.execute(steps.step({"a": 3, "z": 1})).sampled_token_ids["a"]
    while len(again) < len(plain):
        again += runner.execute(steps.step({"z": 1, "a": 1})).sampled_token_ids["a"]
    assert again == plain


def test_A14_min_tokens_holds_every_end_token_back():
    """The model wants nothing but end tokens; none may be chosen before the third."""
    runner, model = make_runner()
    favourite = torch.zeros(VOCAB)
    favourite[[3, 8, 9]] = torch.tensor([5.0, 7.0, 6.0])
    model.compute_logits = lambda hidden: favourite.repeat(len(hidden), 1)
    steps = Steps()
    params = SamplingParams(temperature=0.0, min_tokens=3, stop_token_ids=[3])
    steps.add("a", [1, 2], params, eos=[8, 9])
    steps.add("b", [1, 2], GREEDY, eos=[8, 9])
    tokens = []
    for counts in [{"a": 2, "b": 2}] + [{"a": 1, "b": 1}] * 4:
        output = runner.execute(steps.step(counts)).sampled_token_ids
        tokens += output["a"]
        assert output["b"] == [8]
    assert all(token not in (3, 8, 9) for token in tokens[:3])
    assert tokens[3:] == [8, 8]


def test_logprobs_go_to_those_who_asked(steps):
    runner, _ = make_runner()
    steps.add("a", [1, 2, 3])
    steps.add("b", [4, 5], SamplingParams(temperature=0.0, logprobs=2))
    output = runner.execute(steps.step({"a": 3, "b": 2}))
    assert list(output.logprobs) == ["b"]
    (report,) = output.logprobs["b"]
    assert report.token_ids[0] == output.sampled_token_ids["b"][0]
    assert len(report.token_ids) == 3
    assert report.rank == 1


def test_sampling_settings_of_a_row_s_last_owner_are_forgotten():
    """The cached sampling batch must not outlive the requests that it was made for."""
    runner, _ = make_runner(max_num_seqs=1)
    steps = Steps()
    steps.add("a", [1], SamplingParams(temperature=0.0, logprobs=1))
    runner.execute(steps.step({"a": 1}))
    assert runner.execute(steps.step({"a": 1})).logprobs
    steps.finish("a")
    steps.add("b", [1])
    output = runner.execute(steps.step({"b": 1}))
    assert not output.logprobs
    assert output.sampled_token_ids == {"b": follow([1], 1)}


def test_a_step_beyond_what_is_known_is_refused(steps):
    runner, _ = make_runner()
    steps.add("a", [1, 2])
    with pytest.raises(ValueError, match="up to token 3 was asked for, but 2 tokens"):
        runner.execute(steps.step({"a": 3}))


def test_a_refused_request_leaves_the_others_as_they_were(steps):
    runner, _ = make_runner()
    steps.add("a", [1, 2])
    runner.execute(steps.step({"a": 2}))
    steps.add("b", [2**40])
    with pytest.raises(RuntimeError):
        runner.execute(steps.step({"b": 1}))
    assert runner.rows.index.keys() == {"a"}
    known = [1, 2, *follow([1, 2], 1)]
    assert runner.execute(steps.step({"a": 1})).sampled_token_ids == {"a": follow(known, 1)}


def test_blocks_are_copied_before_the_step_and_in_order(steps):
    runner, _ = make_runner()
    cache = runner.kv_caches[0]
    for block in range(cache.shape[1]):
        cache[:, block] = block
    steps.add("a", [1, 2])
    # 30 -> 31, then 31 -> 32 must carry 30's data on; 33 is overwritten after it was read.
    step = steps.step({"a": 2}, block_copies=[(30, 31), (31, 32), (33, 34), (35, 33)])
    runner.execute(step)
    assert [int(cache[0, b, 0, 0, 0]) for b in (30, 31, 32, 33, 34, 35)] == [30, 30, 30, 35, 33, 35]
    assert [int(cache[1, b, 3, 0, 1]) for b in (31, 32, 33, 34)] == [30, 30, 35, 33]


@pytest.mark.parametrize("block_dim", [0, 1])
def test_copy_blocks_equals_one_copy_after_another(block_dim):
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        cache = torch.randn(9, 9, 2, generator=generator)
        truth = cache.clone()
        copies = torch.randint(0, 9, (6, 2), generator=generator).tolist()
        for source, destination in copies:
            truth.select(block_dim, destination).copy_(truth.select(block_dim, source).clone())
        copy_blocks([cache], block_dim, copies)
        assert torch.equal(cache, truth)


class Guesser:
    """Proposes the model's own continuation, spoilt from place `wrong_at` on."""

    def __init__(self, length, wrong_at):
        self.length, self.wrong_at, self.seen = length, wrong_at, []

    def propose(self, inputs):
        drafts = {}
        for request_id, row in zip(inputs.request_ids, inputs.rows, strict=True):
            count = inputs.request_rows.state(row).num_tokens
            known = inputs.request_rows.token_ids[row, :count].tolist()
            # The state that the newest token was drawn from: (its token, its position).
            position = len(self.seen), inputs.request_ids.index(request_id)
            self.seen.append(position)
            assert inputs.hidden[position[1]].tolist() == [known[-2], count - 2]
            guess = follow(known, self.length)
            guess[self.wrong_at :] = [(t + 1) % VOCAB for t in guess[self.wrong_at :]]
            drafts[request_id] = guess
        return drafts


@pytest.mark.parametrize("wrong_at", [0, 1, 2, 3])
def test_SP1_drafts_right_or_wrong_change_no_token(wrong_at):
    guesser = Guesser(length=3, wrong_at=wrong_at)
    runner, _ = make_runner(drafter=guesser, max_num_seqs=2)
    steps = Steps()
    prompts = {"a": [1, 2, 3], "b": [5, 5]}
    tokens = {name: [] for name in prompts}
    for name, prompt in prompts.items():
        steps.add(name, prompt, SamplingParams(temperature=0.0, logprobs=1))
    counts, drafts = {name: len(p) for name, p in prompts.items()}, {}
    for _ in range(5):
        output = runner.execute(steps.step(counts, drafts))
        for name, new in output.sampled_token_ids.items():
            assert len(new) == (wrong_at + 1 if drafts else 1)
            assert [r.token_ids[0] for r in output.logprobs[name]] == new
            steps.computed[name] -= len(drafts.get(name, [])) - (len(new) - 1)
            tokens[name] += new
        drafts = output.draft_token_ids
        counts = {name: 1 + len(d) for name, d in drafts.items()}
    for name, prompt in prompts.items():
        assert tokens[name] == follow(prompt, len(tokens[name]))


def test_SP1_seeded_draws_are_the_same_with_drafts():
    """A row with drafts draws at each place with the key it would have had without them."""
    params = SamplingParams(temperature=4.0)
    runner, _ = make_runner()
    steps = Steps()
    steps.add("a", [3, 1], params, seed=9)
    plain = list(runner.execute(steps.step({"a": 2})).sampled_token_ids["a"])
    for _ in range(11):
        plain += runner.execute(steps.step({"a": 1})).sampled_token_ids["a"]

    runner, _ = make_runner()
    steps = Steps()
    steps.add("a", [3, 1], params, seed=9)
    tokens = list(runner.execute(steps.step({"a": 2})).sampled_token_ids["a"])
    taken = []
    while len(tokens) < 10:
        done = len(tokens)
        # The first draft is right, the second wrong.
        drafts = [plain[done], (plain[done + 1] + 1) % VOCAB]
        new = runner.execute(steps.step({"a": 3}, {"a": drafts})).sampled_token_ids["a"]
        taken.append(len(new))
        steps.computed["a"] -= 2 - (len(new) - 1)
        tokens += new
    assert tokens == plain[: len(tokens)]
    assert set(taken) == {2}


class Journal(NullConnector):
    """Writes down the order in which it is called."""

    def __init__(self):
        super().__init__(engine_config(), KVConnectorRole.WORKER)
        self.calls = []

    def bind_connector_metadata(self, metadata):
        self.calls.append(("bind", metadata))

    def start_load_kv(self, batch):
        self.calls.append(("load", len(batch.input_ids)))

    def wait_for_save(self):
        self.calls.append(("saved",))

    def get_finished(self, finished_req_ids):
        self.calls.append(("finished", set(finished_req_ids)))
        return KVConnectorOutput(finished_sending={"x"})

    def clear_connector_metadata(self):
        self.calls.append(("clear",))


def test_PD1_the_connector_is_called_around_the_forward_pass(steps):
    journal = Journal()
    runner, model = make_runner(connector=journal)
    steps.add("a", [1, 2])
    output = runner.execute(steps.step({"a": 2}, kv_connector_metadata="m1"))
    assert output.kv_connector_output.finished_sending == {"x"}
    # A step without tokens still lets transfers begin and end.
    steps.finish("a")
    runner.execute(steps.step({}, kv_connector_metadata="m2"))
    assert journal.calls == [
        ("bind", "m1"), ("load", 2), ("saved",), ("finished", set()), ("clear",),
        ("bind", "m2"), ("load", 0), ("finished", {"a"}), ("clear",),
    ]  # fmt: skip
    assert len(model.batches) == 1
    assert len(runner.rows) == 0


def test_dummy_run_writes_nowhere_and_takes_no_row():
    runner, model = make_runner(max_num_seqs=3, max_model_len=10)
    caches = [torch.zeros(2, 1, 4, 1, 2)]
    for tokens, lengths in ((1, [1]), (7, [3, 2, 2]), (100, [10, 10, 10])):
        runner.dummy_run(tokens, caches, [4])
        batch = model.batches[-1]
        assert batch.attn[0].query_lens == lengths
        assert (batch.attn[0].slot_mapping == -1).all()
        assert len(batch.input_ids) == sum(lengths)
        assert (batch.attn[0].block_table == 0).all()
    assert len(runner.rows) == 0
