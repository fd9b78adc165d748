"""Waiting queues against plain lists."""

import random

import pytest
from nanofixtures.scheduling import make_request

from nanoserve.request_queue import FCFSRequestQueue, PriorityRequestQueue, make_request_queue


def names(queue):
    return [request.request_id for request in queue]


def request(name, priority=0, arrival=0.0, sequence=0):
    made = make_request(name, 1, priority=priority, arrival_time=arrival)
    made.sequence = sequence
    return made


def test_fcfs_order_and_return_to_the_head():
    queue = make_request_queue("fcfs")
    assert isinstance(queue, FCFSRequestQueue)
    a, b, c = (request(name) for name in "abc")
    for each in (a, b, c):
        queue.add(each)
    assert queue.peek() is a
    assert [queue.pop(), queue.pop()] == [a, b]
    queue.put_back([a, b])
    assert names(queue) == ["a", "b", "c"]
    queue.remove(b)
    assert names(queue) == ["a", "c"]
    with pytest.raises(KeyError):
        queue.remove(b)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_empty_queue(policy):
    queue = make_request_queue(policy)
    assert not queue
    with pytest.raises(IndexError):
        queue.peek()
    with pytest.raises(IndexError):
        queue.pop()
    queue.put_back([])
    assert len(queue) == 0


def test_T46_priority_then_arrival_then_order_of_coming():
    queue = make_request_queue("priority")
    assert isinstance(queue, PriorityRequestQueue)
    queue.add(request("late", priority=1, arrival=2.0, sequence=0))
    queue.add(request("second", priority=1, arrival=1.0, sequence=2))
    queue.add(request("first", priority=1, arrival=1.0, sequence=1))
    queue.add(request("urgent", priority=-5, arrival=9.0, sequence=3))
    assert names(queue) == ["urgent", "first", "second", "late"]
    assert [queue.pop().request_id for _ in range(4)] == ["urgent", "first", "second", "late"]


def test_T46_priority_queue_equals_sorting():
    rng = random.Random(1)
    queue, model, out = PriorityRequestQueue(), [], []
    for i in range(4000):
        what = rng.randrange(4)
        if what == 0:
            made = request(f"r{i}", rng.randint(0, 3), rng.randint(0, 3), i)
            queue.add(made)
            model.append(made)
        elif what == 1 and model:
            model.sort(key=lambda r: r.sort_key)
            assert queue.peek() is model[0]
            out.append(queue.pop())
            assert out[-1] is model.pop(0)
        elif what == 2 and model:
            gone = model.pop(rng.randrange(len(model)))
            queue.remove(gone)
            out.append(gone)
        elif what == 3:
            back = [out.pop() for _ in range(rng.randint(0, len(out)))]
            queue.put_back(back)
            model += back
        assert len(queue) == len(model)
    assert names(queue) == [r.request_id for r in sorted(model, key=lambda r: r.sort_key)]


def test_removed_requests_do_not_pile_up_in_the_heap():
    queue = PriorityRequestQueue()
    stays = request("stays", priority=-1)
    queue.add(stays)
    for i in range(5000):
        made = request(f"r{i}", sequence=i)
        queue.add(made)
        queue.remove(made)
        assert len(queue._heap) <= 2 * len(queue) + 20
    assert names(queue) == ["stays"]
