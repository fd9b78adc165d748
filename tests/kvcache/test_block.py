"""The free queue: order, links both ways, and O(1) removal from the middle."""

import random

import pytest

from nanoserve.kvcache.block import FreeKVCacheBlockQueue, KVCacheBlock


def ids(queue):
    """Block ids from front to back, after checking that the way back is the same."""
    forward = [block.block_id for block in queue.get_all_free_blocks()]
    backward, block = [], queue._tail.prev_free
    while block is not queue._head:
        backward.append(block.block_id)
        block = block.prev_free
    assert backward[::-1] == forward
    assert len(forward) == queue.num_free_blocks
    return forward


def detached(block):
    return block.prev_free is None and block.next_free is None


def test_T01_order_removal_and_return():
    blocks = [KVCacheBlock(i) for i in range(5)]
    queue = FreeKVCacheBlockQueue(blocks)
    assert ids(queue) == [0, 1, 2, 3, 4]
    assert queue.popleft() is blocks[0]
    assert detached(blocks[0])
    queue.remove(blocks[2])
    assert detached(blocks[2])
    assert ids(queue) == [1, 3, 4]
    queue.append(blocks[0])
    assert ids(queue) == [1, 3, 4, 0]
    queue.remove(blocks[0])
    queue.remove(blocks[1])
    assert ids(queue) == [3, 4]
    assert [queue.popleft().block_id, queue.popleft().block_id] == [3, 4]
    assert ids(queue) == []
    with pytest.raises(ValueError, match="no free blocks"):
        queue.popleft()


def test_T01_removing_a_block_that_is_not_there_is_an_error():
    blocks = [KVCacheBlock(i) for i in range(3)]
    queue = FreeKVCacheBlockQueue(blocks)
    queue.remove(blocks[1])
    with pytest.raises(ValueError, match="not in the free queue"):
        queue.remove(blocks[1])
    assert ids(queue) == [0, 2]


@pytest.mark.parametrize("already", [0, 1, 3])
@pytest.mark.parametrize("n", [0, 1, 2, 4])
def test_T02_append_n(already, n):
    queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(already)])
    queue.append_n([KVCacheBlock(100 + i) for i in range(n)])
    assert ids(queue) == [*range(already), *range(100, 100 + n)]


@pytest.mark.parametrize("already", [0, 1, 3])
@pytest.mark.parametrize("n", [0, 1, 2, 4])
def test_T03_prepend_n(already, n):
    queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(already)])
    queue.prepend_n([KVCacheBlock(100 + i) for i in range(n)])
    assert ids(queue) == [*range(100, 100 + n), *range(already)]


@pytest.mark.parametrize("n", range(6))
def test_T04_popleft_n(n):
    queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(5)])
    taken = queue.popleft_n(n)
    assert [block.block_id for block in taken] == list(range(n))
    assert all(detached(block) for block in taken)
    assert ids(queue) == list(range(n, 5))


def test_T04_popleft_n_takes_nothing_when_there_are_too_few():
    queue = FreeKVCacheBlockQueue([KVCacheBlock(i) for i in range(2)])
    with pytest.raises(ValueError, match="3 blocks wanted, 2 free"):
        queue.popleft_n(3)
    assert ids(queue) == [0, 1]


def test_queue_equals_a_list_over_random_operations():
    rng = random.Random(0)
    blocks = [KVCacheBlock(i) for i in range(40)]
    queue, model, out = FreeKVCacheBlockQueue(blocks), list(blocks), []
    for _ in range(3000):
        what = rng.randrange(5)
        if what == 0 and model:
            out.append(queue.popleft())
            assert out[-1] is model.pop(0)
        elif what == 1 and model:
            n = rng.randint(0, len(model))
            taken = queue.popleft_n(n)
            assert taken == model[:n]
            out += taken
            del model[:n]
        elif what == 2 and model:
            block = model.pop(rng.randrange(len(model)))
            queue.remove(block)
            out.append(block)
        elif what in (3, 4):
            rng.shuffle(out)
            n = rng.randint(0, len(out))
            back = [out.pop() for _ in range(n)]
            if what == 3:
                queue.append_n(back)
                model += back
            else:
                queue.prepend_n(back)
                model = back + model
        assert ids(queue) == [block.block_id for block in model]


def test_repr_names_one_block_not_the_queue():
    blocks = [KVCacheBlock(i) for i in range(1000)]
    FreeKVCacheBlockQueue(blocks)
    assert repr(blocks[7]) == "KVCacheBlock(7, ref_cnt=0)"
    blocks[7].block_hash = (bytes.fromhex("00112233445566"), 0)
    assert repr(blocks[7]) == "KVCacheBlock(7, ref_cnt=0, hash=00112233)"
