"""Blocks taken away and given back: who loses them, what a step looks like, and that it ends."""

import pytest
from nanofixtures.scheduling import ChainIndex, Harness, make_request, make_scheduler

from nanoserve.engine.messages import FinishReason
from nanoserve.request import RequestStatus
from nanoserve.scheduler_output import ModelRunnerOutput
from nanoserve.step_builder import StepBuilder


def small(**settings):
    """Eight blocks of four tokens, one of them the null block."""
    defaults = {"num_blocks": 8, "block_size": 4, "max_model_len": 28, "max_num_seqs": 4}
    return make_scheduler(**{**defaults, "max_num_batched_tokens": 64, **settings})


def test_SC4_the_last_running_loses_its_blocks_and_nothing_new_is_admitted():
    harness = Harness(small())
    for i in range(3):
        harness.add(make_request(f"r{i}", 8, max_tokens=8))
    harness.step()
    harness.add(make_request("new", 1, max_tokens=1))
    scheduler = harness.scheduler
    # Six blocks hold the prompts and one is free: the first to need a ninth slot takes it.
    out = harness.step()
    assert out.num_scheduled_tokens == {"r0": 1, "r1": 1}
    assert out.preempted_req_ids == {"r2"}
    assert out.scheduled_new_reqs == []
    assert [r.request_id for r in scheduler.waiting] == ["r2", "new"]
    victim = harness.requests["r2"]
    assert victim.status == RequestStatus.PREEMPTED
    assert (victim.num_computed_tokens, victim.num_preemptions) == (0, 1)
    assert victim.num_output_tokens == 1
    assert scheduler.make_stats().num_preemptions == 1
    harness.run(100)
    harness.check_end()


def test_SC5_a_resumed_request_computes_all_it_knows_and_repeats_nothing():
    harness = Harness(small())
    for i in range(2):
        harness.add(make_request(f"r{i}", 11, max_tokens=12))
    harness.run(100)
    harness.check_end()
    assert harness.num_preemptions >= 1
    resumed = [s["r1"] for s in harness.steps if s.get("r1", 0) > 1]
    assert resumed[0] == 11
    assert resumed[1] > 11  # the prompt and the tokens it had
    assert len(harness.tokens["r1"]) == 12
    assert harness.finished["r1"].num_preemptions == harness.requests["r1"].num_preemptions >= 1


@pytest.mark.parametrize("generated", [0, 1, 3, 4, 5])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_A05_preempted_after_any_number_of_tokens(generated, policy):
    harness = Harness(small(policy=policy))
    victim = harness.add(make_request("v", 6, max_tokens=9, priority=1))
    for _ in range(generated):
        harness.step()
    assert victim.num_output_tokens == generated
    if generated:
        # As if another request had needed its blocks.
        plan = StepBuilder(8)
        harness.scheduler._preempt(victim, plan)
        harness.oracle.rows.pop("v")
        assert plan.preempted == {"v"}
    harness.run(60)
    harness.check_end()
    assert len(harness.tokens["v"]) == 9
    assert harness.finished["v"].finish_reason == FinishReason.LENGTH


def test_A57_SC6_a_victim_already_in_the_step_is_taken_out_and_its_budget_given_back():
    scheduler = small(policy="priority", num_blocks=7)
    harness = Harness(scheduler)
    low = harness.add(make_request("low", 6, max_tokens=9, priority=9, arrival_time=1.0))
    harness.step()
    high = harness.add(make_request("high", 8, max_tokens=8, priority=0, arrival_time=2.0))
    third = harness.add(make_request("third", 7, max_tokens=8, priority=1, arrival_time=3.0))
    harness.step()
    assert scheduler.running == [low, high, third]
    assert scheduler.kv_cache_manager.num_free_blocks == 0
    tail = scheduler.kv_cache_manager.get_block_ids("low")[0][-1]
    # Two tokens for this step: "low" gets one and "high" the other, but "high" needs a block, and
    # "low" has to give it. So its token goes to "third", which would have had none.
    scheduler.config.max_num_batched_tokens = 2
    out = harness.step()
    assert out.num_scheduled_tokens == {"high": 1, "third": 1}
    assert [c.request_id for c in out.scheduled_cached_reqs] == ["high", "third"]
    assert out.scheduled_cached_reqs[0].new_block_ids == ([tail],)
    assert out.preempted_req_ids == {"low"}
    assert low.num_output_tokens == 2
    scheduler.config.max_num_batched_tokens = 64
    harness.run(100)
    harness.check_end()


def test_A57_a_victims_drafts_leave_the_step_too():
    scheduler = small(policy="priority", num_blocks=5)
    low = make_request("low", 5, max_tokens=9, priority=9)
    high = make_request("high", 8, max_tokens=8, priority=0, arrival_time=2.0)
    for request in (low, high):
        scheduler.add_request(request)
    step = scheduler.schedule()
    scheduler.update_from_output(step, sampled(step))
    scheduler.running.reverse()
    assert scheduler.running == [low, high]
    low.spec_token_ids = [1, 2]
    step = scheduler.schedule()
    assert step.preempted_req_ids == {"low"}
    assert step.num_scheduled_tokens == {"high": 1}
    assert step.scheduled_spec_decode_tokens == {}
    assert low.spec_token_ids == []


def test_T47_priority_decides_who_goes_and_space_saves_everyone():
    harness = Harness(small(policy="priority", num_blocks=7))
    harness.add(make_request("low", 8, max_tokens=8, priority=5, arrival_time=0.0))
    harness.add(make_request("high", 8, max_tokens=8, priority=-5, arrival_time=9.0))
    harness.run(200)
    harness.check_end()
    assert harness.requests["high"].num_preemptions == 0
    assert harness.requests["low"].num_preemptions >= 1
    roomy = Harness(small(policy="priority", num_blocks=30))
    roomy.add(make_request("low", 8, max_tokens=8, priority=5))
    roomy.add(make_request("high", 8, max_tokens=8, priority=-5))
    roomy.run(200)
    roomy.check_end()
    assert roomy.num_preemptions == 0


def test_T47_between_equals_the_latest_arrival_goes_wherever_it_stands():
    harness = Harness(small(policy="priority", max_num_batched_tokens=8))
    harness.add(make_request("late", 7, max_tokens=12, priority=1, arrival_time=5.0))
    harness.step()
    harness.add(make_request("early", 7, max_tokens=12, priority=1, arrival_time=1.0))
    harness.run(200)
    harness.check_end()
    assert harness.requests["late"].num_preemptions >= 1
    assert harness.requests["early"].num_preemptions == 0


def test_SC8_T46_admission_by_priority_across_preemptions():
    harness = Harness(small(policy="priority", max_num_seqs=1))
    for name, priority in (("c", 3), ("a", 1), ("b", 2), ("z", 1)):
        harness.add(make_request(name, 3, max_tokens=2, priority=priority))
    harness.run(100)
    harness.check_end()
    first_seen = list(dict.fromkeys(name for step in harness.steps for name in step))
    assert first_seen == ["a", "z", "b", "c"]


def test_SC4_the_last_one_preempts_itself():
    harness = Harness(small())
    harness.add(make_request("first", 19, max_tokens=9))
    harness.add(make_request("last", 8, max_tokens=4))
    harness.step()
    out = harness.step()  # "first" fits its 20th token; "last" needs a third block: there is none
    assert out.num_scheduled_tokens == {"first": 1}
    assert out.preempted_req_ids == {"last"}
    harness.run(100)
    harness.check_end()


def test_a_prompt_is_admitted_only_when_all_of_it_fits():
    # Four of seven blocks are taken. The first chunk would fit, the prompt would not: its later
    # chunks would have to wait for blocks, or take them from others.
    harness = Harness(small(max_num_batched_tokens=8))
    holder = harness.add(make_request("holder", 13, max_tokens=3))
    harness.step()
    harness.step()
    waits = harness.add(make_request("waits", 13, max_tokens=2))
    while not holder.is_finished:
        assert "waits" not in harness.step().num_scheduled_tokens
    assert harness.step().num_scheduled_tokens == {"waits": 8}
    harness.run(20)
    harness.check_end()
    assert waits.num_preemptions == holder.num_preemptions == 0


@pytest.mark.parametrize("num_preemptions", [2, 3])
def test_SC4_the_third_preemption_makes_the_difference(num_preemptions):
    scheduler = small()
    harness = Harness(scheduler)
    harness.add(make_request("holder", 8, max_tokens=20))
    harness.step()
    returning = make_request("back", 5, max_tokens=19)
    returning.num_preemptions = num_preemptions
    harness.add(returning)
    out = harness.step()  # holder has three of seven blocks: 16 slots are free, 23 may be needed
    assert ("back" in out.num_scheduled_tokens) == (num_preemptions < 3)
    harness.run(200)
    harness.check_end()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "max_num_seqs", "budget"), [(20, 24, 8, 8), (1, 46, 16, 32)]
)
def test_A56_bounded_preemptions_and_steps(prompt, max_tokens, max_num_seqs, budget):
    def run(max_num_seqs):
        harness = Harness(
            small(
                num_blocks=14,
                max_model_len=48,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
            )
        )
        for i in range(16):
            harness.add(make_request(f"r{i}", prompt, max_tokens=max_tokens))
        harness.run(2000)
        harness.check_end()
        return harness

    serial, batched = run(1), run(max_num_seqs)
    assert serial.num_preemptions == 0
    assert batched.num_preemptions > 0
    # Three at most come for nothing; each further one needs another request to end first.
    assert max(r.num_preemptions for r in batched.requests.values()) <= 3
    assert batched.num_steps <= 3 * serial.num_steps


def test_A58_steady_arrivals_never_stall_a_decode():
    harness = Harness(
        make_scheduler(num_blocks=400, block_size=4, max_model_len=128, max_num_batched_tokens=16)
    )
    for i in range(4):
        harness.add(make_request(f"d{i}", 2, max_tokens=60))
    harness.step()
    for step in range(55):
        harness.add(make_request(f"p{step}", 64, max_tokens=4))
        out = harness.step()
        decoding = [
            r for r in harness.requests.values() if r.num_output_tokens and not r.is_finished
        ]
        gaps = [r.request_id for r in decoding if r.request_id not in out.num_scheduled_tokens]
        assert gaps == [], f"step {step}"
        assert out.total_num_scheduled_tokens == 16
    harness.run(2000)
    harness.check_end()


def sampled(step, token=0):
    return ModelRunnerOutput({request_id: [token] for request_id in step.num_scheduled_tokens})


def test_T44_a_token_of_a_step_under_way_reaches_a_preempted_request():
    scheduler = small(num_blocks=5)
    one, two = make_request("one", 8, max_tokens=6), make_request("two", 7, max_tokens=6)
    scheduler.add_request(one)
    scheduler.add_request(two)
    first = scheduler.schedule()
    scheduler.update_from_output(first, sampled(first))
    under_way = None
    # "one" needs a third block for its ninth token, so "two" goes. Before that, a step of "two"
    # alone is sent off: as if the other's result had been late.
    one.num_computed_tokens += 1
    under_way = scheduler.schedule()
    assert under_way.num_scheduled_tokens == {"two": 1}
    one.num_computed_tokens -= 1
    preempting = scheduler.schedule()
    assert preempting.preempted_req_ids == {"two"}
    assert preempting.num_scheduled_tokens == {"one": 1}
    # While its token is on the way it does not come back, even if there is room.
    scheduler.finish_requests(["one"], RequestStatus.FINISHED_ABORTED)
    assert scheduler.schedule().num_scheduled_tokens == {}
    outputs = scheduler.update_from_output(under_way, sampled(under_way, 5))
    assert [(o.request_id, o.new_token_ids) for o in outputs] == [("two", [5])]
    assert two.status == RequestStatus.PREEMPTED
    resumed = scheduler.schedule()
    assert resumed.num_scheduled_tokens == {"two": 9}
    assert resumed.scheduled_new_reqs[0].token_ids[-1] == 5
    assert resumed.scheduled_new_reqs[0].num_prompt_tokens == 7


def test_T44_a_preempted_request_may_end_by_a_step_under_way():
    scheduler = small(num_blocks=5)
    one, two = make_request("one", 8, max_tokens=6), make_request("two", 7, max_tokens=2)
    scheduler.add_request(one)
    scheduler.add_request(two)
    first = scheduler.schedule()
    scheduler.update_from_output(first, sampled(first))
    one.num_computed_tokens += 1
    under_way = scheduler.schedule()
    one.num_computed_tokens -= 1
    assert scheduler.schedule().preempted_req_ids == {"two"}
    outputs = scheduler.update_from_output(under_way, sampled(under_way))
    assert [(o.request_id, o.finish_reason) for o in outputs] == [("two", FinishReason.LENGTH)]
    assert len(scheduler.waiting) == 0
    assert "two" not in scheduler.requests


def test_T44_drafts_of_a_step_under_way_are_not_taken_back_from_nothing():
    scheduler = small(num_blocks=6)
    one, two = make_request("one", 8, max_tokens=6), make_request("two", 5, max_tokens=6)
    scheduler.add_request(one)
    scheduler.add_request(two)
    first = scheduler.schedule()
    scheduler.update_from_output(first, sampled(first))
    two.spec_token_ids = [1, 2]
    one.num_computed_tokens += 1
    under_way = scheduler.schedule()
    assert under_way.num_scheduled_tokens == {"two": 3}
    one.num_computed_tokens -= 1
    scheduler.kv_cache_manager.block_pool.get_new_blocks(1)
    assert scheduler.schedule().preempted_req_ids == {"two"}
    scheduler.update_from_output(under_way, ModelRunnerOutput({"two": [7]}))
    assert (two.num_computed_tokens, two.num_tokens) == (0, 7)


def test_SC11_abort_of_a_preempted_request():
    harness = Harness(small())
    for i in range(3):
        harness.add(make_request(f"r{i}", 8, max_tokens=8))
    harness.step()
    assert harness.step().preempted_req_ids == {"r2"}
    harness.abort("r2")
    harness.run(100)
    harness.check_end()
    assert len(harness.finished) == 2


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("others", [0, 2])
def test_a_request_that_outgrows_the_whole_pool_ends_and_frees_it(policy, others):
    # A length that the pool cannot hold is refused by make_kv_cache_config; here it is let in.
    harness = Harness(small(max_model_len=64, policy=policy))
    harness.add(make_request("big", 6, max_tokens=60))
    for i in range(others):
        harness.add(make_request(f"r{i}", 5, max_tokens=10, priority=1))
    harness.run(300)
    output = harness.finished.pop("big")
    assert output.finish_reason == FinishReason.LENGTH
    # 28 slots: the 29th token is known and cannot be computed.
    assert len(harness.tokens["big"]) == 29 - 6
    del harness.requests["big"]
    harness.check_end()


def test_outgrown_while_preempted():
    harness = Harness(small(max_model_len=64))
    request = harness.add(make_request("big", 6, max_tokens=60))
    harness.step()
    # Known tokens past the pool, as a token of a step under way can leave them.
    harness.scheduler.running.clear()
    harness.scheduler.kv_cache_manager.free(request)
    harness.oracle.rows.clear()
    request.status, request.num_computed_tokens = RequestStatus.PREEMPTED, 0
    request.token_ids += [0] * 30
    harness.scheduler.waiting.add(request)
    harness.add(make_request("small", 3, max_tokens=2))
    out = harness.step()
    assert out.num_scheduled_tokens == {"small": 3}
    assert harness.finished["big"].finish_reason == FinishReason.LENGTH


def test_A03_hits_are_looked_up_again_at_each_attempt():
    harness = Harness(small(prefix_index=ChainIndex, max_model_len=24))
    prefix = [1, 2, 3, 4, 5, 6, 7, 8]
    harness.add(make_request("warm", [*prefix, 9], max_tokens=1))
    harness.run(10)
    index = harness.scheduler.kv_cache_manager.prefix_index
    # "hold" takes five of the seven blocks. R needs four: two hits and two new, and waits.
    harness.add(make_request("hold", 17, max_tokens=6))
    harness.step()
    r = harness.add(make_request("r", [*prefix, 20, 21, 22, 23, 24, 25], max_tokens=3))
    harness.step()
    assert r.status == RequestStatus.WAITING
    lookups = index.num_lookups
    # What was found then goes: "hold" grows, then a request that needs every block comes first.
    harness.abort("hold")
    harness.scheduler.waiting.remove(r)
    harness.add(make_request("evict", 23, max_tokens=1))
    harness.scheduler.waiting.add(r)
    harness.run(60)
    harness.check_end()
    assert index.num_lookups > lookups
    assert harness.finished["r"].num_cached_tokens == 0


def test_A01_a_prompt_served_wholly_from_the_cache_computes_a_token():
    harness = Harness(small(prefix_index=ChainIndex, max_num_batched_tokens=8))
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    for names in (["a"], ["b"], ["c", "d"]):
        for name in names:
            harness.add(make_request(name, prompt, max_tokens=4))
        harness.run(40)
    harness.check_end()
    assert [harness.finished[n].num_cached_tokens for n in "abcd"] == [0, 4, 4, 4]
    assert harness.tokens["a"] == harness.tokens["b"] == harness.tokens["c"] == harness.tokens["d"]


def test_A02_rounds_with_a_common_head():
    scheduler = make_scheduler(
        num_blocks=60, max_model_len=64, prefix_index=ChainIndex, max_num_batched_tokens=24
    )
    harness = Harness(scheduler)
    head = [i * 7 % 29 for i in range(37)]
    for round_number, order in enumerate(
        ([0, 1, 2, 3, 4, 5], [3, 5, 1, 0, 4, 2], [5, 4, 0, 1, 2, 3])
    ):
        for i in order:
            harness.add(make_request(f"{round_number}-{i}", head + [i] * (i + 1), max_tokens=6))
        harness.run(200)
    harness.check_end()
    for i in range(6):
        assert harness.tokens[f"0-{i}"] == harness.tokens[f"1-{i}"] == harness.tokens[f"2-{i}"]
        assert harness.finished[f"2-{i}"].num_cached_tokens == 32


def test_A25_drafts_never_enter_the_prefix_cache():
    harness = Harness(small(prefix_index=ChainIndex), num_drafts=3, seed=1)
    harness.add(make_request("a", 6, max_tokens=12))
    harness.run(60)  # the harness compares every cached block with what the oracle wrote
    tokens = harness.requests["a"].token_ids
    harness.add(make_request("b", [*tokens[:-3], (tokens[-3] + 1) % 29, 0, 0], max_tokens=3))
    harness.run(60)
    harness.check_end()
    assert harness.finished["b"].num_cached_tokens == 12


def test_T45_T48_resumption_finds_what_is_still_cached():
    harness = Harness(small(prefix_index=ChainIndex))
    harness.add(make_request("a", 11, max_tokens=12))
    harness.add(make_request("b", 11, max_tokens=12))
    harness.run(100)
    harness.check_end()
    assert harness.num_preemptions >= 1
    resumed = [s["b"] for s in harness.steps if s.get("b", 0) > 1]
    assert len(resumed) >= 2
    assert resumed[1] < 12
    # T45: a query is counted once a request, whatever happens to it later.
    stats = harness.scheduler.make_stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (22, 0)
    assert harness.finished["b"].num_cached_tokens == 0


@pytest.mark.parametrize("cached", [False, True])
def test_T56_A62_nothing_is_left_after_many_requests(cached):
    scheduler = small(
        num_blocks=20,
        max_model_len=40,
        max_num_batched_tokens=16,
        max_num_seqs=6,
        prefix_index=ChainIndex if cached else None,
    )
    harness = Harness(scheduler, num_drafts=2)
    for i in range(300):
        harness.add(make_request(f"r{i}", 1 + i * 7 % 45, max_tokens=1 + i % 9, eos=[3]))
        if i % 11 == 0:
            harness.abort(f"r{i}", f"r{max(0, i - 3)}")
        harness.step()
    harness.run(3000)
    harness.check_end()
    assert harness.num_preemptions > 0
    assert any(o.error for o in harness.finished.values())
    assert not scheduler._ended
    assert not scheduler._sending
    assert not scheduler._finished_req_ids
