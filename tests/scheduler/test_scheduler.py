"""The one loop: budgets, chunks, order, drafts, stops, aborts, steps under way."""

import pytest
from nanofixtures.scheduling import ChainIndex, Harness, make_request, make_scheduler

from nanoserve.engine.connector import KVConnectorOutput, NullConnector
from nanoserve.engine.messages import FinishReason
from nanoserve.request import RequestStatus
from nanoserve.scheduler import SCHEDULERS, Scheduler
from nanoserve.scheduler_output import ModelRunnerOutput


def results(step, tokens=None, **fields):
    """One token, 0, for each request that is due one, unless told otherwise."""
    sampled = {request_id: [0] for request_id in step.num_scheduled_tokens}
    sampled.update(tokens or {})
    return ModelRunnerOutput(sampled_token_ids=sampled, **fields)


def run(scheduler, tokens=None):
    step = scheduler.schedule()
    return step, scheduler.update_from_output(step, results(step, tokens))


def counts(step):
    return list(step.num_scheduled_tokens.values())


def add(scheduler, *lengths, **params):
    made = [make_request(f"r{i}", n, **params) for i, n in enumerate(lengths)]
    for request in made:
        scheduler.add_request(request)
    return made


def test_registry():
    assert SCHEDULERS.load("default") is Scheduler


def test_T37_everything_that_fits_is_scheduled_with_its_data():
    scheduler = make_scheduler(num_blocks=100)
    requests = add(scheduler, 5, 17, 33)
    step = scheduler.schedule()
    assert step.num_scheduled_tokens == {"r0": 5, "r1": 17, "r2": 33}
    assert step.total_num_scheduled_tokens == 55
    assert [new.request_id for new in step.scheduled_new_reqs] == ["r0", "r1", "r2"]
    assert [new.token_ids for new in step.scheduled_new_reqs] == [r.token_ids for r in requests]
    assert [new.block_ids for new in step.scheduled_new_reqs] == [([1],), ([2, 3],), ([4, 5, 6],)]
    assert step.scheduled_cached_reqs == []
    assert [request.status for request in requests] == [RequestStatus.RUNNING] * 3
    scheduler.update_from_output(step, results(step))
    step = scheduler.schedule()
    assert counts(step) == [1, 1, 1]
    assert step.scheduled_new_reqs == []
    assert [c.num_computed_tokens for c in step.scheduled_cached_reqs] == [5, 17, 33]
    assert [c.new_block_ids for c in step.scheduled_cached_reqs] == [([],)] * 3


def test_T37_SC11_abort_waiting_running_and_unknown():
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, 5, 5, 5)
    step = scheduler.schedule()
    assert list(step.num_scheduled_tokens) == ["r0"]
    scheduler.finish_requests(["r1", "r0", "nobody"], RequestStatus.FINISHED_ABORTED)
    # r0 was aborted while its step was under way: nothing comes of it.
    assert scheduler.update_from_output(step, results(step)) == []
    assert scheduler.has_finished_requests()
    step = scheduler.schedule()
    assert step.finished_req_ids == {"r0", "r1"}
    assert list(step.num_scheduled_tokens) == ["r2"]
    assert not scheduler.has_finished_requests()
    scheduler.finish_requests(["r2"], RequestStatus.FINISHED_ABORTED)
    assert not scheduler.has_unfinished_requests()
    assert scheduler.has_finished_requests()
    # One more step, empty, tells the worker.
    step = scheduler.schedule()
    assert step.finished_req_ids == {"r2"}
    assert step.total_num_scheduled_tokens == 0
    assert scheduler.update_from_output(step, results(step)) == []
    assert not scheduler.has_finished_requests()
    assert scheduler.kv_cache_manager.num_free_blocks == 999


def test_T39_long_prefill_threshold_shares_a_step():
    scheduler = make_scheduler(
        max_num_batched_tokens=1024, long_prefill_token_threshold=400, max_num_seqs=3
    )
    add(scheduler, 800, 800, 800)
    due = [{"r0": [], "r1": [], "r2": []}, {"r2": []}, {"r2": []}]
    trace = []
    for tokens in due:
        step, _ = run(scheduler, tokens)
        trace.append(counts(step))
    assert trace == [[400, 400, 224], [400, 400, 224], [1, 1, 352]]


def test_T42_SC7_two_steps_under_way():
    scheduler = make_scheduler(max_num_batched_tokens=512, max_num_seqs=2)
    add(scheduler, 512, 512)
    first = scheduler.schedule()
    assert first.num_scheduled_tokens == {"r0": 512}
    second = scheduler.schedule()
    assert second.num_scheduled_tokens == {"r1": 512}
    # Neither has a token to compute until its result is in.
    assert scheduler.schedule().num_scheduled_tokens == {}
    scheduler.update_from_output(first, results(first))
    assert scheduler.schedule().num_scheduled_tokens == {"r0": 1}
    scheduler.update_from_output(second, results(second))
    assert scheduler.schedule().num_scheduled_tokens == {"r1": 1}


def test_T43_order_with_chunked_prefill_on():
    scheduler = make_scheduler(max_num_batched_tokens=1024)
    add(scheduler, 800, 800, 10, 10)
    assert scheduler.schedule().num_scheduled_tokens == {"r0": 800, "r1": 224}


def test_T43_SC3_order_with_chunked_prefill_off():
    scheduler = make_scheduler(
        max_num_batched_tokens=1024, max_model_len=1024, enable_chunked_prefill=False
    )
    add(scheduler, 800, 800, 10, 10)
    # The second waits whole, and the short ones behind it do not go past it.
    assert scheduler.schedule().num_scheduled_tokens == {"r0": 800}


def test_the_long_prefill_threshold_means_nothing_without_chunks():
    scheduler = make_scheduler(
        max_num_batched_tokens=1024,
        max_model_len=1024,
        enable_chunked_prefill=False,
        long_prefill_token_threshold=100,
    )
    add(scheduler, 800)
    assert scheduler.schedule().num_scheduled_tokens == {"r0": 800}


@pytest.mark.parametrize("budget", [1, 3, 8, 16, 64])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 65])
def test_A06_any_budget_gives_the_same_tokens(budget, length):
    harness = Harness(make_scheduler(num_blocks=40, block_size=4, max_num_batched_tokens=budget))
    harness.add(make_request("a", length, max_tokens=5))
    harness.add(make_request("b", 3, max_tokens=5))
    harness.run(200)
    harness.check_end()
    assert sum(step.get("a", 0) for step in harness.steps) == length + 4
    assert max(sum(step.values()) for step in harness.steps) <= budget


def test_SC2_max_num_seqs():
    scheduler = make_scheduler(max_num_seqs=2)
    add(scheduler, 5, 5, 5, max_tokens=2)
    assert list(run(scheduler)[0].num_scheduled_tokens) == ["r0", "r1"]
    step, outputs = run(scheduler)
    assert list(step.num_scheduled_tokens) == ["r0", "r1"]
    assert [o.finish_reason for o in outputs] == [FinishReason.LENGTH] * 2
    step, _ = run(scheduler)
    assert list(step.num_scheduled_tokens) == ["r2"]
    assert step.finished_req_ids == {"r0", "r1"}


def test_SC7_part_of_a_prompt_emits_nothing():
    scheduler = make_scheduler(max_num_batched_tokens=4)
    add(scheduler, 10)
    emitted = []
    for tokens in ({"r0": []}, {"r0": []}, None, None):
        emitted.append(len(run(scheduler, tokens)[1]))
    assert emitted == [0, 0, 1, 1]


def test_SC13_longest_prompt_gives_one_token():
    harness = Harness(make_scheduler(num_blocks=6, block_size=2, max_model_len=10))
    harness.add(make_request("a", 9, max_tokens=None))
    harness.run(20)
    harness.check_end()
    assert len(harness.tokens["a"]) == 1
    assert harness.finished["a"].finish_reason == FinishReason.LENGTH


def test_SC14_nothing_to_do():
    scheduler = make_scheduler()
    assert not scheduler.has_unfinished_requests()
    assert not scheduler.has_finished_requests()
    step, outputs = run(scheduler)
    assert step.num_scheduled_tokens == {}
    assert outputs == []


def test_A54_a_live_id_is_refused_and_a_finished_one_may_return():
    scheduler = make_scheduler()
    add(scheduler, 5)
    with pytest.raises(ValueError, match="'r0' is in use"):
        scheduler.add_request(make_request("r0", 3))
    scheduler.finish_requests(["r0"], RequestStatus.FINISHED_ABORTED)
    scheduler.add_request(make_request("r0", 3))
    assert scheduler.schedule().num_scheduled_tokens == {"r0": 3}


@pytest.mark.parametrize("length", [29, 40, 64, 70])
def test_A55_what_can_never_fit_ends_at_once_and_blocks_no_one(length):
    harness = Harness(make_scheduler(num_blocks=8, block_size=4, max_model_len=64))
    harness.add(make_request("long", length))
    harness.add(make_request("short", 3, max_tokens=4))
    harness.step()
    error = harness.finished["long"]
    assert error.finish_reason == FinishReason.ERROR
    assert str(length) in error.error
    assert harness.steps[0] == {"short": 3}
    harness.run(20)
    harness.check_end()


def test_abort_of_a_refused_request_emits_nothing():
    scheduler = make_scheduler(max_model_len=8)
    add(scheduler, 20)
    scheduler.finish_requests(["r0"], RequestStatus.FINISHED_ABORTED)
    assert run(scheduler)[1] == []


def test_T40_several_tokens_in_one_step_are_cut_at_the_stop():
    scheduler = make_scheduler()
    add(scheduler, 5, 5, stop_token_ids=[7], max_tokens=3)
    run(scheduler)
    for request in scheduler.running:
        request.spec_token_ids = [1, 2, 3]
    step, outputs = run(scheduler, {"r0": [1, 7, 3, 4], "r1": [1, 2, 3, 4]})
    assert counts(step) == [4, 4]
    assert [o.new_token_ids for o in outputs] == [[1, 7], [1, 2]]
    assert [(o.finish_reason, o.stop_reason) for o in outputs] == [
        (FinishReason.STOP, 7),
        (FinishReason.LENGTH, None),
    ]
    assert not scheduler.running


def test_T51_no_drafts_behind_part_of_a_prompt():
    scheduler = make_scheduler(max_num_batched_tokens=50)
    add(scheduler, 80)
    drafts = {"r0": [1, 2, 3]}
    step = scheduler.schedule()
    assert counts(step) == [50]
    scheduler.update_from_output(step, results(step, {"r0": []}, draft_token_ids=drafts))
    step = scheduler.schedule()
    assert counts(step) == [30]
    assert step.scheduled_spec_decode_tokens == {}
    scheduler.update_from_output(step, results(step, draft_token_ids=drafts))
    step = scheduler.schedule()
    assert counts(step) == [4]
    assert step.scheduled_spec_decode_tokens == drafts


@pytest.mark.parametrize(("accepted", "computed"), [([5], 11), ([1, 5], 12), ([1, 2, 3, 9], 14)])
def test_SC9_rejected_drafts_are_taken_back(accepted, computed):
    scheduler = make_scheduler(block_size=4)
    (request,) = add(scheduler, 10)
    run(scheduler)
    request.spec_token_ids = [1, 2, 3]
    step, outputs = run(scheduler, {"r0": accepted})
    assert counts(step) == [4]
    assert outputs[0].new_token_ids == accepted
    assert request.num_computed_tokens == computed == request.num_tokens - 1
    # The blocks that the drafts took are there for what comes.
    assert len(scheduler.kv_cache_manager.get_block_ids("r0")[0]) == 4
    step, _ = run(scheduler)
    assert counts(step) == [1]


def test_SC9_drafts_count_in_the_budget_and_are_trimmed():
    scheduler = make_scheduler(max_num_batched_tokens=5, max_model_len=12)
    one, two = add(scheduler, 2, 2, max_tokens=None)
    run(scheduler)
    one.spec_token_ids = [1, 2]
    two.spec_token_ids = [1, 2, 3]
    step, _ = run(scheduler, {"r0": [1, 2, 3], "r1": [1, 2]})
    assert step.num_scheduled_tokens == {"r0": 3, "r1": 2}
    assert step.scheduled_spec_decode_tokens == {"r0": [1, 2], "r1": [1]}
    assert two.spec_token_ids == []
    # No draft past the model's length: position 11 is never computed.
    one.token_ids += [0] * 3
    one.num_computed_tokens += 3
    one.spec_token_ids = [1, 2, 3, 4]
    step = scheduler.schedule()
    assert step.scheduled_spec_decode_tokens["r0"] == [1, 2]
    assert one.num_computed_tokens == 11


@pytest.mark.parametrize("seed", range(8))
def test_drafts_good_and_bad_change_no_token(seed):
    scheduler = make_scheduler(
        num_blocks=12,
        block_size=4,
        max_model_len=32,
        max_num_batched_tokens=9,
        prefix_index=ChainIndex,
    )
    harness = Harness(scheduler, num_drafts=4, seed=seed)
    for i in range(6):
        harness.add(make_request(f"r{i}", 3 + 2 * i, max_tokens=14, eos=[seed]))
    harness.run(400)
    harness.check_end()


def test_logprobs_follow_their_tokens():
    scheduler = make_scheduler(num_blocks=12, block_size=4, max_model_len=32)
    harness = Harness(scheduler, num_drafts=4)
    harness.add(make_request("a", 5, max_tokens=9))
    harness.run(40)  # the harness compares each output's logprobs with its tokens
    harness.check_end()


def test_stats_count_each_step_once():
    scheduler = make_scheduler(
        num_blocks=9, block_size=4, max_model_len=32, prefix_index=ChainIndex, max_num_seqs=2
    )
    harness = Harness(scheduler)
    for i in range(3):
        harness.add(make_request(f"r{i}", [1] * 9, max_tokens=2))
    harness.step()
    stats = scheduler.make_stats()
    assert (stats.num_running_reqs, stats.num_waiting_reqs) == (2, 1)
    assert stats.kv_cache_usage == 6 / 8
    assert stats.num_scheduled_tokens == 18
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (18, 0)
    harness.step()
    harness.step()
    stats = scheduler.make_stats()
    assert stats.num_scheduled_tokens == 2 + 1
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (9, 8)
    assert harness.finished.keys() == {"r0", "r1"}
    harness.run(10)
    assert harness.finished["r2"].num_cached_tokens == 8
    harness.check_end()


class AskLater(NullConnector):
    """Knows nothing of request "late" yet, and has two blocks of "far" elsewhere."""

    def __init__(self, config, role):
        super().__init__(config, role)
        self.ready = set()
        self.calls = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.request_id.startswith("late") and request.request_id not in self.ready:
            return None, False
        return (8 if request.request_id == "far" else 0), False

    def update_state_after_alloc(self, request, block_ids, num_external_tokens):
        self.calls.append(("alloc", request.request_id, block_ids, num_external_tokens))

    def build_connector_meta(self, scheduler_output):
        return sorted(scheduler_output.num_scheduled_tokens)

    def request_finished(self, request, block_ids):
        self.calls.append(("finished", request.request_id, block_ids))
        return request.request_id == "far", None

    def update_connector_output(self, connector_output):
        self.calls.append(("output", connector_output.data))


def test_SC12_a_request_that_waits_for_something_is_skipped_and_keeps_its_place():
    scheduler = make_scheduler(connector=AskLater, max_num_seqs=2)
    for name in ("late1", "late2", "a", "b", "c"):
        scheduler.add_request(make_request(name, 4, max_tokens=1))
    assert list(run(scheduler)[0].num_scheduled_tokens) == ["a", "b"]
    assert [r.request_id for r in scheduler.waiting] == ["late1", "late2", "c"]
    scheduler.connector.ready = {"late2"}
    assert list(run(scheduler)[0].num_scheduled_tokens) == ["late2", "c"]
    scheduler.connector.ready = {"late1"}
    assert list(run(scheduler)[0].num_scheduled_tokens) == ["late1"]


def test_PD1_PD2_the_connector_is_called_in_the_right_places():
    scheduler = make_scheduler(num_blocks=20, block_size=4, connector=AskLater)
    scheduler.add_request(make_request("far", 11, max_tokens=1))
    step = scheduler.schedule()
    # Eight of eleven tokens come from elsewhere, into blocks that are the request's own.
    assert step.num_scheduled_tokens == {"far": 3}
    assert step.scheduled_new_reqs[0].num_computed_tokens == 8
    assert step.scheduled_new_reqs[0].block_ids == ([1, 2, 3],)
    assert step.kv_connector_metadata == ["far"]
    outputs = scheduler.update_from_output(step, results(step))
    assert outputs[0].num_cached_tokens == 8
    assert scheduler.connector.calls == [
        ("alloc", "far", ([1, 2, 3],), 8),
        ("finished", "far", ([1, 2, 3],)),
    ]
    # Its blocks stay until they have been sent.
    assert scheduler.kv_cache_manager.num_free_blocks == 16
    step = scheduler.schedule()
    sent = KVConnectorOutput(finished_sending={"far", "nobody"}, data="sent")
    scheduler.update_from_output(step, ModelRunnerOutput(kv_connector_output=sent))
    assert scheduler.connector.calls[-1] == ("output", "sent")
    assert scheduler.kv_cache_manager.num_free_blocks == 19


class Overlapping(Scheduler):
    """The least that overlapping steps need: one placeholder for a token still being computed."""

    def _update_after_schedule(self, output):
        super()._update_after_schedule(output)
        for request_id in output.num_scheduled_tokens:
            request = self.requests[request_id]
            if request.num_computed_tokens >= request.num_tokens:
                request.num_output_placeholders += 1

    def _update_request_with_output(self, request, new_token_ids):
        request.num_output_placeholders -= len(new_token_ids)
        return super()._update_request_with_output(request, new_token_ids)


def test_the_two_hooks_are_enough_to_plan_a_step_ahead():
    plain = make_scheduler()
    scheduler = Overlapping(
        type("Config", (), {"scheduler": plain.config, "model": plain}),
        plain.kv_cache_config,
        plain.connector,
    )
    request = make_request("a", 5, max_tokens=4)
    scheduler.add_request(request)
    steps = [scheduler.schedule(), scheduler.schedule(), scheduler.schedule()]
    assert [counts(step) for step in steps] == [[5], [1], [1]]
    assert [c.num_computed_tokens for s in steps for c in s.scheduled_cached_reqs] == [5, 6]
    for step in steps:
        scheduler.update_from_output(step, results(step))
    assert request.num_output_tokens == 3
    assert request.num_output_placeholders == 0
