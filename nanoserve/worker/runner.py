"""One step on the device: from a `SchedulerOutput` to tokens.

The runner brings its rows and block tables up to date with what changed, lays out the batch with a
few vectorised operations (whose prefill it is, or whether it is a decode, makes no difference),
runs the model, samples where a request's last known token was computed, and writes the new tokens
back to the rows. It must not know why a step is what it is: that is the scheduler's business.
"""

from collections.abc import Sequence

import torch

from nanoserve.config.engine import EngineConfig
from nanoserve.engine.connector import KVConnector
from nanoserve.forward import AttentionBackend, ForwardBatch
from nanoserve.kvcache.spec import KVCacheConfig
from nanoserve.sampling.sampler import Sampler, SamplerOutput, SamplingBatch, SamplingColumns
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler_output import ModelRunnerOutput, SchedulerOutput
from nanoserve.worker.batch import StepPlan, dummy_batch, empty_batch, make_batch
from nanoserve.worker.block_table import BlockTable
from nanoserve.worker.drafter import Drafter, DraftInputs
from nanoserve.worker.graph import CausalLM, GraphRunner
from nanoserve.worker.request_rows import RequestRows


class ModelRunner:
    """Runs steps.

    Args:
        config: the engine's configuration.
        model: see `nanoserve.models.loader`.
        backend: computes attention; the model's layers hold the same object.
        graph: launches the forward pass.
        drafter: proposes tokens after each step.
        connector: the worker's side of the KV connector.
        device: where everything lives.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: CausalLM,
        backend: AttentionBackend,
        graph: GraphRunner,
        drafter: Drafter,
        connector: KVConnector,
        device: torch.device,
    ) -> None:
        self.model = model
        self.device = device
        self.max_num_seqs = config.scheduler.max_num_seqs
        self.max_model_len = config.model.max_model_len
        self.rows = RequestRows(self.max_num_seqs, self.max_model_len, device)
        self.sampler = Sampler(config.model.tokenizer_size)
        self.block_tables: list[BlockTable] = []
        self.kv_caches: list[torch.Tensor] = []
        self._backend = backend
        self._graph = graph
        self._drafter = drafter
        self._connector = connector
        self._block_dim = _block_dim(backend)
        self._sampling: tuple[tuple[int, list[int]], SamplingBatch] | None = None

    def set_cache(self, kv_cache_config: KVCacheConfig, kv_caches: list[torch.Tensor]) -> None:
        """Take the cache: one tensor a layer, and make a block table for each group."""
        self.kv_caches = kv_caches
        self.block_tables = [
            BlockTable(
                self.max_num_seqs,
                group.spec.blocks_for(self.max_model_len),
                group.spec.block_size,
                self.device,
            )
            for group in kv_cache_config.groups
        ]

    def capture(self) -> None:
        """Let the graph runner get ready: the cache has its final place."""
        self._graph.capture(self.kv_caches)

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step."""
        self._update_rows(step)
        self._connector.bind_connector_metadata(step.kv_connector_metadata)
        output = ModelRunnerOutput()
        if step.num_scheduled_tokens:
            plan = self._plan(step)
            batch = make_batch(plan, self.rows, self.block_tables)
            self._prepare_attention(batch)
            self._connector.start_load_kv(batch)
            hidden = self._graph.run(batch, self.kv_caches)
            self._connector.wait_for_save()
            if plan.samples:
                self._sample(plan, batch, hidden[batch.logits_indices], output)
        else:
            self._connector.start_load_kv(empty_batch(self.device))
        output.kv_connector_output = self._connector.get_finished(step.finished_req_ids)
        self._connector.clear_connector_metadata()
        return output

    def _update_rows(self, step: SchedulerOutput) -> None:
        """Apply what changed: rows freed, rows given, blocks appended, blocks copied."""
        for request_id in (*step.finished_req_ids, *step.preempted_req_ids):
            row = self.rows.remove(request_id)
            if row is not None:
                for table in self.block_tables:
                    table.clear(row)
        for new in step.scheduled_new_reqs:
            row = self.rows.add(new)
            for table, blocks in zip(self.block_tables, new.block_ids, strict=True):
                table.append(row, blocks)
        for cached in step.scheduled_cached_reqs:
            row = self.rows.index[cached.request_id]
            for table, blocks in zip(self.block_tables, cached.new_block_ids, strict=True):
                table.append(row, blocks)
        for table in self.block_tables:
            table.apply()
        if step.block_copies:
            copy_blocks(self.kv_caches, self._block_dim, step.block_copies)

    def _plan(self, step: SchedulerOutput) -> StepPlan:
        """Lay the step out, and write the drafts that it verifies to their rows."""
        computed = {new.request_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        for cached in step.scheduled_cached_reqs:
            computed[cached.request_id] = cached.num_computed_tokens
        plan, start = StepPlan(), 0
        draft_writes: tuple[list[int], list[int], list[int]] = ([], [], [])
        for request_id, count in step.num_scheduled_tokens.items():
            row, past = self.rows.index[request_id], computed[request_id]
            known = self.rows.state(row).num_tokens
            drafts = step.scheduled_spec_decode_tokens.get(request_id, [])
            if past + count > known + len(drafts):
                raise ValueError(
                    f"request {request_id}: a step up to token {past + count} was asked for, but "
                    f"{known} tokens and {len(drafts)} drafts are known"
                )
            if drafts:
                draft_writes[0].extend([row] * len(drafts))
                draft_writes[1].extend(range(known, known + len(drafts)))
                draft_writes[2].extend(drafts)
            if past + count >= known:
                verified = drafts[: past + count - known]
                plan.samples[request_id] = (len(plan.logits_rows), verified)
                first = start + known - 1 - past
                plan.logits_indices.extend(range(first, first + len(verified) + 1))
                plan.logits_rows.extend([row] * (len(verified) + 1))
            plan.request_ids.append(request_id)
            plan.rows.append(row)
            plan.computed.append(past)
            plan.scheduled.append(count)
            plan.starts.append(start)
            start += count
        if draft_writes[0]:
            self.rows.write(*torch.tensor(draft_writes, device=self.device))
        return plan

    def _sample(
        self,
        plan: StepPlan,
        batch: ForwardBatch,
        hidden: torch.Tensor,
        output: ModelRunnerOutput,
    ) -> None:
        """Draw, write the tokens to their rows, and only then tell the host.

        A draft is right if it is the very token that is drawn at its place. The draw's key is the
        same as it would be without drafts, so drafts change no token; and a draft that is one
        certain guess is accepted with its probability, as often as rejection sampling would.

        Args:
            hidden: [rows of logits, hidden_size].
        """
        places = batch.positions[batch.logits_indices] + 1
        sampling = self._sampling_batch(plan, places)
        sampled = self.sampler(self.model.compute_logits(hidden), sampling)
        rows = torch.tensor(plan.logits_rows, device=self.device)
        self.rows.write(rows, places, sampled.token_ids)
        tokens = sampled.token_ids.tolist()
        newest = self._accept(plan, tokens, sampled, output)
        if len(newest) < len(tokens):
            hidden = hidden[torch.tensor(newest, device=self.device)]
        request_ids = list(plan.samples)
        own_rows = [self.rows.index[request_id] for request_id in request_ids]
        output.draft_token_ids = self._drafter.propose(
            DraftInputs(request_ids, own_rows, self.rows, hidden)
        )

    def _accept(
        self,
        plan: StepPlan,
        tokens: list[int],
        sampled: SamplerOutput,
        output: ModelRunnerOutput,
    ) -> list[int]:
        """Keep each request's tokens up to the first draft that was wrong.

        Returns:
            For each request that sampled, the row of logits that gave its newest token.
        """
        newest = []
        for request_id, (first, drafts) in plan.samples.items():
            right = 0
            while right < len(drafts) and tokens[first + right] == drafts[right]:
                right += 1
            last = first + right
            output.sampled_token_ids[request_id] = tokens[first : last + 1]
            if first in sampled.logprobs:
                output.logprobs[request_id] = [sampled.logprobs[i] for i in range(first, last + 1)]
            self.rows.state(plan.logits_rows[first]).num_tokens += right + 1
            newest.append(last)
        return newest

    def _sampling_batch(self, plan: StepPlan, places: torch.Tensor) -> SamplingBatch:
        """What the sampler must know. While the same rows sample, only places and bans are new."""
        key = (self.rows.version, plan.logits_rows)
        if self._sampling is None or self._sampling[0] != key:
            rows = torch.tensor(plan.logits_rows, device=self.device)
            params = [self.rows.state(row).params for row in plan.logits_rows]
            batch = SamplingBatch.build(self.rows.columns.select(rows), params, places)
            self._sampling = (key, batch)
        batch = self._sampling[1]
        batch.positions = places
        batch.held_back = self._held_back(plan)
        return batch

    def _held_back(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor] | None:
        """End tokens of requests that have not generated min_tokens yet."""
        logits_rows: list[int] = []
        token_ids: list[int] = []
        for first, drafts in plan.samples.values():
            state = self.rows.state(plan.logits_rows[first])
            short = min(state.min_length - state.num_tokens, len(drafts) + 1)
            for offset in range(short):
                logits_rows.extend([first + offset] * len(state.end_token_ids))
                token_ids.extend(state.end_token_ids)
        if not token_ids:
            return None
        pairs = torch.tensor([logits_rows, token_ids], device=self.device)
        return pairs[0], pairs[1]

    @torch.inference_mode()
    def dummy_run(
        self, num_tokens: int, kv_caches: Sequence[torch.Tensor], block_sizes: Sequence[int]
    ) -> None:
        """A step of `num_tokens` made-up tokens over as many rows as may be, with sampling.

        Args:
            kv_caches: one a layer, of at least one block; nothing is written to them.
            block_sizes: one a KV cache group.
        """
        num_reqs = min(num_tokens, self.max_num_seqs)
        share, extra = divmod(num_tokens, num_reqs)
        lengths = [min(share + (i < extra), self.max_model_len) for i in range(num_reqs)]
        batch = dummy_batch(lengths, block_sizes, self.device)
        self._prepare_attention(batch)
        hidden = self._graph.run(batch, kv_caches)[batch.logits_indices]
        columns = SamplingColumns(1, self.device)
        params = SamplingParams(top_p=0.9)
        columns.write(0, params, seed=0)
        same = torch.zeros(num_reqs, dtype=torch.int64, device=self.device)
        sampling = SamplingBatch.build(columns.select(same), [params] * num_reqs, same)
        self.sampler(self.model.compute_logits(hidden), sampling)

    def _prepare_attention(self, batch: ForwardBatch) -> None:
        for metadata in batch.attn:
            self._backend.prepare(metadata)


def copy_blocks(
    kv_caches: Sequence[torch.Tensor], block_dim: int, copies: Sequence[tuple[int, int]]
) -> None:
    """Copy whole blocks within every layer's cache, as if one after another.

    Args:
        block_dim: the dimension of a cache that counts blocks.
        copies: (source, destination) block ids.
    """
    runs: list[list[tuple[int, int]]] = [[]]
    written: set[int] = set()
    for source, destination in copies:
        if source in written or destination in written:
            # It depends on a copy that stands before it: a new run, after that one.
            runs.append([])
            written.clear()
        runs[-1].append((source, destination))
        written.add(destination)
    for run in runs:
        source_ids, destination_ids = torch.tensor(run, device=kv_caches[0].device).unbind(1)
        for cache in kv_caches:
            cache.index_copy_(block_dim, destination_ids, cache.index_select(block_dim, source_ids))


def _block_dim(backend: AttentionBackend) -> int:
    """Which dimension of a cache tensor counts blocks: the one that differs between two sizes."""
    three, five = backend.kv_cache_shape(3, 2, 2, 2), backend.kv_cache_shape(5, 2, 2, 2)
    return next(dim for dim in range(len(three)) if three[dim] != five[dim])
