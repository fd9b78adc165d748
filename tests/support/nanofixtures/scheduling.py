"""A scheduler with nothing behind it but an oracle: real pool, manager and scheduler, fake model.

`KVOracle` stands where the worker would. It keeps a row for each request and a pool of slots,
writes (token, position) pairs where the block tables say, and derives each next token from the
pairs that it really reads back. A wrong table, a block handed out twice, a stale prefix hit or a
lost copy therefore changes the tokens, and `expected_output` says, without any of that machinery,
what they should have been.
"""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from nanoserve.config.arch import ModelArch
from nanoserve.config.cache import CacheConfig
from nanoserve.config.engine import EngineConfig
from nanoserve.config.model import ModelConfig
from nanoserve.config.scheduler import SchedulerConfig
from nanoserve.engine.connector import KVConnector, KVConnectorRole, NullConnector
from nanoserve.engine.messages import EngineCoreOutput
from nanoserve.kvcache.block import KVCacheBlock
from nanoserve.kvcache.block_pool import BlockPool
from nanoserve.kvcache.manager import KVCacheManager
from nanoserve.kvcache.prefix_cache import PrefixCache
from nanoserve.kvcache.spec import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    SlidingWindowSpec,
)
from nanoserve.request import Request, RequestStatus
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler import Scheduler
from nanoserve.scheduler_output import ModelRunnerOutput, SchedulerOutput, TokenLogprobs

VOCAB = 29


def make_cache_config(
    num_blocks: int,
    block_size: int = 16,
    num_groups: int = 1,
    windows: Sequence[int | None] = (),
) -> KVCacheConfig:
    """num_blocks blocks, the null block included; `windows` are the groups', None is unlimited."""
    groups = []
    for layer, window in enumerate(windows or [None] * num_groups):
        page = (block_size, 1 + layer, 8, 4)
        spec: KVCacheSpec = FullAttentionSpec(*page)
        if window is not None:
            spec = SlidingWindowSpec(*page, window)
        groups.append(KVCacheGroup((layer,), spec))
    return KVCacheConfig(num_blocks, tuple(groups))


def windows_of(config: KVCacheConfig) -> list[int | None]:
    """Each group's window; None is unlimited."""
    return [getattr(group.spec, "window", None) for group in config.groups]


def make_scheduler(
    num_blocks: int = 1000,
    block_size: int = 16,
    num_groups: int = 1,
    max_model_len: int = 4096,
    prefix_index=None,
    connector: type[KVConnector] = NullConnector,
    windows: Sequence[int | None] = (),
    **settings,
) -> Scheduler:
    """A scheduler; `settings` are fields of SchedulerConfig."""
    arch = ModelArch("LlamaForCausalLM", VOCAB, 8, 8, 1, 1, 1, 8, max_model_len)
    config = EngineConfig(
        model=ModelConfig("tiny", "", "", ["tiny"], arch, max_model_len=max_model_len),
        cache=CacheConfig(block_size=block_size),
        scheduler=SchedulerConfig(**settings),
    )
    return Scheduler(
        config,
        make_cache_config(num_blocks, block_size, num_groups, windows),
        connector(config, KVConnectorRole.SCHEDULER),
        prefix_index,
    )


def make_request(
    request_id: str,
    prompt: int | list[int],
    max_tokens: int | None = 16,
    priority: int = 0,
    arrival_time: float = 0.0,
    eos: list[int] | None = None,
    cache_salt: str | None = None,
    fork_of: str | None = None,
    **params,
) -> Request:
    """A request; a number as prompt makes that many tokens, different ones for each id."""
    if isinstance(prompt, int):
        rng = random.Random(request_id)
        prompt = [rng.randrange(VOCAB) for _ in range(prompt)]
    sampling_params = SamplingParams(max_tokens=max_tokens, **params)
    return Request(
        request_id,
        prompt,
        sampling_params,
        0,
        eos or [],
        arrival_time=arrival_time,
        priority=priority,
        cache_salt=cache_salt,
        fork_of=fork_of,
    )


def make_siblings(request_id: str, prompt: int | list[int], n: int, **settings) -> list[Request]:
    """The n sequences of one request, as the front sends them."""
    if isinstance(prompt, int):
        rng = random.Random(request_id)
        prompt = [rng.randrange(VOCAB) for _ in range(prompt)]
    first = f"{request_id}-0"
    return [
        make_request(f"{request_id}-{i}", prompt, fork_of=first if i else None, **settings)
        for i in range(n)
    ]


def block_hash(parent: bytes, tokens: list[int]) -> bytes:
    """The name of a block that follows `parent`."""
    return hashlib.sha256(parent + repr(tokens).encode()).digest()


class ChainIndex:
    """The smallest prefix index there can be: a chain of hashes over the pool's own map."""

    def __init__(self, pool: BlockPool, config: KVCacheConfig) -> None:
        self.pool = pool
        self.config = config
        self.block_size = config.block_size
        self.contents: dict[bytes, list[int]] = {}
        self.num_lookups = 0

    def _hash(self, request: Request, num_blocks: int) -> list[bytes]:
        hashes = request.block_hashes
        for i in range(len(hashes), num_blocks):
            tokens = request.token_ids[i * self.block_size : (i + 1) * self.block_size]
            hashes.append(block_hash(hashes[-1] if hashes else b"", tokens))
            self.contents[hashes[-1]] = request.token_ids[: (i + 1) * self.block_size]
        return hashes

    def lookup(
        self, request: Request, max_num_tokens: int
    ) -> tuple[tuple[list[KVCacheBlock], ...], int]:
        self.num_lookups += 1
        groups = range(len(self.config.groups))
        found: tuple[list[KVCacheBlock], ...] = tuple([] for _ in groups)
        num_blocks = max_num_tokens // self.block_size
        for name in self._hash(request, num_blocks)[:num_blocks]:
            blocks = self.pool.get_cached_block(name, groups)
            if blocks is None:
                break
            for group_id in groups:
                found[group_id].append(blocks[group_id])
        return found, len(found[0]) * self.block_size

    def blocks_filled(
        self, request: Request, group_id: int, blocks: list[KVCacheBlock], start: int, end: int
    ) -> None:
        for block, name in zip(blocks[start:end], self._hash(request, end)[start:end], strict=True):
            self.pool.cache_block(block, name, group_id)


class RecordingCache(PrefixCache):
    """The real prefix cache, and beside it what each name stands for."""

    def __init__(self, pool: BlockPool, config: KVCacheConfig) -> None:
        super().__init__(pool, config)
        self.contents: dict[bytes, list[int]] = {}
        self.salts: dict[bytes, tuple[object, ...]] = {}

    def _names(self, request: Request, num_blocks: int) -> list[bytes]:
        names = super()._names(request, num_blocks)
        for i, name in enumerate(names):
            known = request.token_ids[: (i + 1) * self._block_size]
            assert self.contents.setdefault(name, known) == known, "one name for two prefixes"
            end = (i + 1) * self._block_size
            keys = (*request.extra_keys, *(item for item in request.media if item.offset < end))
            assert self.salts.setdefault(name, keys) == keys, "one name for two salts"
        return names


def next_token(pairs: list[tuple[int, int]]) -> int:
    """The oracle's model: the token that follows (token, position) pairs."""
    return int.from_bytes(hashlib.md5(repr(pairs).encode()).digest()[:4], "little") % VOCAB


def expected_output(
    request: Request, max_model_len: int, window: int | None = None
) -> tuple[list[int], str, int | None]:
    """Tokens, finish reason and stop reason of a request that has the engine to itself.

    `window` is how far back the model sees (the furthest of its groups).
    """
    params, prompt = request.sampling_params, request.token_ids[: request.num_prompt_tokens]
    tokens, out = list(prompt), []
    while True:
        token = next_token(_last(list(zip(tokens, range(len(tokens)), strict=True)), window))
        tokens.append(token)
        out.append(token)
        if len(out) >= params.min_tokens:
            if token in request.eos_token_ids and not params.ignore_eos:
                return out, "stop", None
            if token in params.stop_token_ids:
                return out, "stop", token
        if params.max_tokens is not None and len(out) >= params.max_tokens:
            return out, "length", None
        if len(tokens) >= max_model_len:
            return out, "length", None


def _last(pairs: list[tuple[int, int]], window: int | None) -> list[tuple[int, int]]:
    return pairs if window is None else pairs[-window:]


@dataclass
class _Row:
    token_ids: list[int]
    block_ids: list[list[int]]
    computed: int = 0


@dataclass
class KVOracle:
    """A worker that holds real rows and slots and a model that is a hash. See the module.

    Attributes:
        windows: how far back each group's layers see; None is unlimited.
        num_drafts: drafts to propose after each token; some are right and some are not.
    """

    block_size: int
    windows: Sequence[int | None] = (None,)
    num_drafts: int = 0
    seed: int = 0
    rows: dict[str, _Row] = field(default_factory=dict)
    slots: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self.num_groups = len(self.windows)

    @property
    def window(self) -> int | None:
        """How far back the model sees: as far as any of its layers."""
        sizes = [window for window in self.windows if window is not None]
        return max(sizes) if len(sizes) == len(self.windows) else None

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in step.finished_req_ids | step.preempted_req_ids:
            self.rows.pop(request_id, None)
        self._copy_blocks(step.block_copies)
        for new in step.scheduled_new_reqs:
            assert new.request_id not in self.rows, f"{new.request_id} has a row already"
            self.rows[new.request_id] = _Row(
                list(new.token_ids), [list(g) for g in new.block_ids], new.num_computed_tokens
            )
        for cached in step.scheduled_cached_reqs:
            row = self.rows[cached.request_id]
            row.computed = cached.num_computed_tokens
            for blocks, added in zip(row.block_ids, cached.new_block_ids, strict=True):
                blocks.extend(added)
        result = ModelRunnerOutput()
        # Every row writes before any row reads, as the layers of a model do.
        for request_id, count in step.num_scheduled_tokens.items():
            self._write(request_id, count, step.scheduled_spec_decode_tokens.get(request_id, []))
        for request_id, count in step.num_scheduled_tokens.items():
            drafts = step.scheduled_spec_decode_tokens.get(request_id, [])
            # What a chunk's first token sees is the furthest back that its step reads.
            row = self.rows[request_id]
            known = (row.token_ids + drafts)[: row.computed + 1]
            seen = list(zip(known, range(len(known)), strict=True))
            assert self._read(row, len(known)) == _last(seen, self.window), "a wrong first read"
            tokens = self._sample(row, count, drafts)
            result.sampled_token_ids[request_id] = tokens
            result.logprobs[request_id] = [TokenLogprobs([t], [0.0], 1) for t in tokens]
            if self.num_drafts:
                # Also after part of a prompt: a drafter does not know better, the scheduler must.
                result.draft_token_ids[request_id] = self._draft(self.rows[request_id])
        return result

    def _slot(self, row: _Row, group: int, position: int) -> tuple[int, int]:
        block_id = row.block_ids[group][position // self.block_size]
        assert block_id != 0, "the null block must not be written or read"
        return group, block_id * self.block_size + position % self.block_size

    def _copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        for source, destination in copies:
            for group in range(self.num_groups):
                for offset in range(self.block_size):
                    pair = self.slots.get((group, source * self.block_size + offset))
                    if pair is not None:
                        self.slots[group, destination * self.block_size + offset] = pair

    def _write(self, request_id: str, count: int, drafts: list[int]) -> None:
        row = self.rows[request_id]
        tokens = (row.token_ids + drafts)[row.computed : row.computed + count]
        assert len(tokens) == count, "more tokens scheduled than the worker knows"
        for position, token in enumerate(tokens, start=row.computed):
            for group in range(self.num_groups):
                self.slots[self._slot(row, group, position)] = (token, position)

    def _read(self, row: _Row, num_tokens: int) -> list[tuple[int, int]]:
        """What the last of num_tokens tokens sees, through the tables of every group."""
        views = []
        for group, window in enumerate(self.windows):
            first = 0 if window is None else max(0, num_tokens - window)
            slots = [self._slot(row, group, place) for place in range(first, num_tokens)]
            views.append([self.slots.get(slot, (-1, -1)) for slot in slots])
        longest = max(views, key=len)
        assert all(view == longest[-len(view) :] for view in views), "the groups disagree"
        return longest

    def _sample(self, row: _Row, count: int, drafts: list[int]) -> list[int]:
        end = row.computed + count
        if end < len(row.token_ids):
            return []
        known = len(row.token_ids)
        assert end == known + len(drafts)
        tokens = [next_token(self._read(row, known))]
        for index, draft in enumerate(drafts, start=1):
            if draft != tokens[-1]:
                break
            tokens.append(next_token(self._read(row, known + index)))
        row.token_ids.extend(tokens)
        return tokens

    def _draft(self, row: _Row) -> list[int]:
        pairs = list(zip(row.token_ids, range(len(row.token_ids)), strict=True))
        drafts: list[int] = []
        for _ in range(self._random.randint(0, self.num_drafts)):
            token = next_token(_last(pairs, self.window))
            if self._random.random() < 0.4:
                token = (token + 1) % VOCAB
            drafts.append(token)
            pairs.append((token, len(pairs)))
        return drafts


def check_manager(manager: KVCacheManager) -> None:
    """What holds of pool and tables at any time."""
    pool, queue = manager.block_pool, manager.block_pool.free_block_queue
    held: dict[int, int] = {}
    for table in manager._tables.values():
        for blocks in table.blocks:
            for block in blocks:
                if not block.is_null:
                    held[block.block_id] = held.get(block.block_id, 0) + 1
    free = queue.get_all_free_blocks()
    assert len(free) == queue.num_free_blocks == len({b.block_id for b in free})
    backwards, block = [], queue._tail.prev_free
    while block is not queue._head:
        backwards.append(block)
        block = block.prev_free
    assert backwards[::-1] == free
    free_ids = {b.block_id for b in free}
    assert pool.null_block.ref_cnt == 0
    assert pool.null_block.block_hash is None
    assert 0 not in free_ids
    for block in pool.blocks[1:]:
        assert block.ref_cnt == held.get(block.block_id, 0), block
        assert (block.ref_cnt == 0) == (block.block_id in free_ids), block
        if block.block_hash is not None:
            assert pool._cached[block.block_hash][block.block_id] is block
    for name, blocks_by_id in pool._cached.items():
        assert blocks_by_id
        assert all(block.block_hash == name for block in blocks_by_id.values())


def check_contents(manager: KVCacheManager, oracle: KVOracle) -> None:
    """Every block that can be found by a hash holds what the hash says."""
    size = oracle.block_size
    for (name, group), blocks in manager.block_pool._cached.items():
        tokens = manager.prefix_index.contents[name]
        wanted = list(enumerate(tokens))[-size:]
        for block_id in blocks:
            held = [oracle.slots.get((group, block_id * size + i)) for i in range(size)]
            assert held == [(token, position) for position, token in wanted]


class Harness:
    """A scheduler and an oracle, stepped together, with everything checked at every step."""

    def __init__(self, scheduler: Scheduler, num_drafts: int = 0, seed: int = 0) -> None:
        self.scheduler = scheduler
        config = scheduler.kv_cache_config
        self.oracle = KVOracle(config.block_size, windows_of(config), num_drafts, seed)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[str, list[int]] = {}
        self.finished: dict[str, EngineCoreOutput] = {}
        self.aborted: set[str] = set()
        self.num_steps = 0
        self.num_preemptions = 0
        self.steps: list[dict[str, int]] = []

    def add(self, request: Request) -> Request:
        self.requests[request.request_id] = request
        self.tokens[request.request_id] = []
        self.scheduler.add_request(request)
        return request

    def abort(self, *request_ids: str) -> None:
        self.aborted.update(i for i in request_ids if i not in self.finished)
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    def step(self) -> SchedulerOutput:
        """One step of the engine."""
        scheduler = self.scheduler
        before = list(scheduler.running)
        out = scheduler.schedule()
        self._check_step(out, before)
        check_manager(scheduler.kv_cache_manager)
        result = self.oracle.execute(out)
        for output in scheduler.update_from_output(out, result):
            self._take(output)
        check_manager(scheduler.kv_cache_manager)
        if scheduler.kv_cache_manager.enable_caching:
            check_contents(scheduler.kv_cache_manager, self.oracle)
        self.num_steps += 1
        self.num_preemptions += len(out.preempted_req_ids)
        self.steps.append(dict(out.num_scheduled_tokens))
        return out

    def run(self, limit: int) -> None:
        """Step until nothing is left; fails when that takes more than `limit` steps."""
        start = self.num_steps
        while self.scheduler.has_unfinished_requests() or self.scheduler.has_finished_requests():
            self.step()
            assert self.num_steps - start <= limit, (
                f"not done after {limit} steps: {self.scheduler.running}, "
                f"{list(self.scheduler.waiting)}"
            )

    def check_end(self) -> None:
        """Everything ended as it would have alone, and nothing is left (BP13)."""
        scheduler = self.scheduler
        for request_id, request in self.requests.items():
            if request_id in self.aborted:
                assert request_id not in self.finished
                continue
            output = self.finished[request_id]
            if output.error is None:
                tokens, reason, stop_reason = expected_output(
                    request, scheduler.max_model_len, self.oracle.window
                )
                assert self.tokens[request_id] == tokens, request_id
                assert str(output.finish_reason) == reason
                assert output.stop_reason == stop_reason
        assert not scheduler.requests
        assert not scheduler.running
        assert not scheduler.waiting
        assert not self.oracle.rows
        assert scheduler.kv_cache_manager.num_requests == 0
        pool = scheduler.kv_cache_manager.block_pool
        assert pool.num_free_blocks == pool.num_blocks - 1
        assert all(block.ref_cnt == 0 for block in pool.blocks)

    def _take(self, output: EngineCoreOutput) -> None:
        request_id = output.request_id
        assert request_id not in self.finished, "an output after the last one"
        assert request_id not in self.aborted, "an output after the abort"
        assert output.new_token_ids or output.finish_reason is not None
        if output.new_logprobs is not None:
            assert [lp.token_ids[0] for lp in output.new_logprobs] == output.new_token_ids
        self.tokens[request_id] += output.new_token_ids
        if output.finish_reason is not None:
            self.finished[request_id] = output

    def _check_step(self, out: SchedulerOutput, before: list[Request]) -> None:
        scheduler, config = self.scheduler, self.scheduler.config
        scheduled = out.num_scheduled_tokens
        assert all(count > 0 for count in scheduled.values())
        assert out.total_num_scheduled_tokens <= config.max_num_batched_tokens
        assert len(scheduler.running) <= config.max_num_seqs
        new = [r.request_id for r in out.scheduled_new_reqs]
        cached = [r.request_id for r in out.scheduled_cached_reqs]
        assert cached + new == list(scheduled), "one entry each, running ones first"
        assert not (out.preempted_req_ids and new), "admitted in a step that preempted"
        assert not out.preempted_req_ids & set(scheduled)
        order = [r.request_id for r in before if r.request_id in scheduled]
        assert cached == order
        for request_id, drafts in out.scheduled_spec_decode_tokens.items():
            assert 0 < len(drafts) < scheduled[request_id]
        for request in scheduler.running:
            table = scheduler.kv_cache_manager._tables[request.request_id]
            assert request.num_computed_tokens <= table.num_slots
            assert request.num_computed_tokens < scheduler.max_model_len
