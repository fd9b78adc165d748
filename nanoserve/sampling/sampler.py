"""From logits to tokens.

A row is greedy (the argmax), open (the whole vocabulary may be drawn) or cut (min-p, top-k or top-p
leave a few). The draw is a race: every token still in it gets an exponential time divided by its
probability, and the first one wins, which happens with exactly its probability. A token's time
depends on the request's seed, the position and the token's id alone (`philox`), so the winner is
the same whether the whole vocabulary ran or only the tokens that were left, and whatever else is in
the batch. This module must not know requests, only rows.

Order of work, vLLM's: log-probabilities of the raw logits, tokens held back, temperature, min-p,
top-k and top-p, draw.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from nanoserve.sampling.logprobs import gather_logprobs
from nanoserve.sampling.masks import (
    FIRST_WIDTH,
    GROWTH,
    apply_temperature,
    find_candidates,
    hold_back,
)
from nanoserve.sampling.philox import Purpose, exponential
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler_output import TokenLogprobs

# Logits in float32 at a time while drawing: 16 MiB.
SLICE_ELEMENTS = 1 << 22


class SamplingColumns:
    """The numbers that sampling needs of each request, one row a request, on the device.

    Attributes:
        temperature, top_p, min_p: [num_rows] float32.
        top_k, seed: [num_rows] int64.
    """

    def __init__(self, num_rows: int, device: torch.device) -> None:
        self._floats = torch.zeros(num_rows, 3, dtype=torch.float32, device=device)
        self._ints = torch.zeros(num_rows, 2, dtype=torch.int64, device=device)

    @property
    def device(self) -> torch.device:
        """Where the columns are."""
        return self._ints.device

    def write(self, row: int, params: SamplingParams, seed: int) -> None:
        """Fill a row."""
        # As a signed number: the same 64 bits.
        seed = (seed + 2**63) % 2**64 - 2**63
        self._floats[row] = torch.tensor([params.temperature, params.top_p, params.min_p])
        self._ints[row] = torch.tensor([params.top_k, seed])

    def select(self, rows: torch.Tensor) -> "SamplingColumns":
        """A copy of these rows ([n] int64), in this order."""
        chosen = object.__new__(SamplingColumns)
        chosen._floats, chosen._ints = self._floats[rows], self._ints[rows]
        return chosen

    @property
    def temperature(self) -> torch.Tensor:
        """[num_rows] float32."""
        return self._floats[:, 0]

    @property
    def top_p(self) -> torch.Tensor:
        """[num_rows] float32."""
        return self._floats[:, 1]

    @property
    def min_p(self) -> torch.Tensor:
        """[num_rows] float32."""
        return self._floats[:, 2]

    @property
    def top_k(self) -> torch.Tensor:
        """[num_rows] int64."""
        return self._ints[:, 0]

    @property
    def seed(self) -> torch.Tensor:
        """[num_rows] int64."""
        return self._ints[:, 1]


@dataclass
class SamplingBatch:
    """One step's rows: what each asked for, sorted by how much work it is.

    Attributes:
        columns: one row a row of logits.
        positions: [num_rows] int64, tokens known before the one that is drawn.
        greedy, open, cut: row numbers of each kind (in rising order), int64.
        logprob_rows, num_logprobs: rows that want log-probabilities, and how many each.
        held_back: (row numbers, token ids) that must not be chosen, or None.
    """

    columns: SamplingColumns
    positions: torch.Tensor
    greedy: torch.Tensor
    open: torch.Tensor
    cut: torch.Tensor
    logprob_rows: torch.Tensor
    num_logprobs: list[int] = field(default_factory=list)
    held_back: tuple[torch.Tensor, torch.Tensor] | None = None

    @classmethod
    def build(
        cls, columns: SamplingColumns, params: Sequence[SamplingParams], positions: torch.Tensor
    ) -> "SamplingBatch":
        """Sort rows into kinds. columns and positions have one row for each of params."""
        kinds: tuple[list[int], list[int], list[int]] = ([], [], [])
        logprob_rows = []
        for row, p in enumerate(params):
            kinds[0 if p.greedy else 2 if p.top_k > 0 or p.top_p < 1 or p.min_p > 0 else 1].append(
                row
            )
            if p.logprobs is not None:
                logprob_rows.append(row)
        greedy, open_, cut, with_logprobs = (
            torch.tensor(rows, dtype=torch.int64, device=columns.device)
            for rows in (*kinds, logprob_rows)
        )
        num_logprobs = [params[row].logprobs or 0 for row in logprob_rows]
        return cls(columns, positions, greedy, open_, cut, with_logprobs, num_logprobs)


@dataclass
class SamplerOutput:
    """What was chosen.

    Attributes:
        token_ids: [num_rows] int64, on the device.
        logprobs: row number -> its report, for rows that asked.
    """

    token_ids: torch.Tensor
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


class Sampler:
    """Chooses one token a row.

    Args:
        num_tokens: ids the tokenizer knows; columns of the logits past them are padding of the
            output layer and are never looked at. None takes all columns.
    """

    def __init__(self, num_tokens: int | None = None) -> None:
        self.num_tokens = num_tokens

    def __call__(self, logits: torch.Tensor, batch: SamplingBatch) -> SamplerOutput:
        """Choose.

        Args:
            logits: [num_rows, vocab_size], any float type; tokens held back are set to -inf in it.
            batch: what each row asked for.
        """
        logits = logits[:, : self.num_tokens]
        raw = logits
        if batch.held_back is not None:
            if batch.num_logprobs:
                raw = logits.clone()
            hold_back(logits, *batch.held_back)
        output = SamplerOutput(self._choose(logits, batch))
        if batch.num_logprobs:
            rows = batch.logprob_rows
            reports = gather_logprobs(raw[rows], output.token_ids[rows], batch.num_logprobs)
            output.logprobs = dict(zip(rows.tolist(), reports, strict=True))
        return output

    def _choose(self, logits: torch.Tensor, batch: SamplingBatch) -> torch.Tensor:
        if len(batch.greedy) == len(logits):
            return logits.argmax(-1)
        token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
        if len(batch.greedy):
            token_ids[batch.greedy] = logits[batch.greedy].argmax(-1)
        step = max(1, SLICE_ELEMENTS // logits.shape[1])
        for rows in batch.open.split(step):
            if len(rows):
                token_ids[rows] = self._draw_open(logits, rows, batch)
        for rows in batch.cut.split(step):
            if len(rows):
                self._draw_cut(logits, rows, batch, token_ids)
        return token_ids

    def _draw_open(
        self, logits: torch.Tensor, rows: torch.Tensor, batch: SamplingBatch
    ) -> torch.Tensor:
        """Rows in which every token may win."""
        columns = batch.columns.select(rows)
        scaled = apply_temperature(logits[rows], columns.temperature)
        times = exponential(
            columns.seed, batch.positions[rows], Purpose.SAMPLE, vocab_size=scaled.shape[1]
        )
        return race(scaled, times)

    def _draw_cut(
        self,
        logits: torch.Tensor,
        rows: torch.Tensor,
        batch: SamplingBatch,
        token_ids: torch.Tensor,
    ) -> None:
        """Rows in which few tokens may win; those whose cut is not in sight look further."""
        columns = batch.columns.select(rows)
        scaled = apply_temperature(logits[rows], columns.temperature)
        width = FIRST_WIDTH
        while len(rows):
            found = find_candidates(scaled, columns.top_k, columns.top_p, columns.min_p, width)
            # The longest run of tokens that any row keeps: no other needs a number.
            kept = int((found.logits > float("-inf")).sum(1).amax().clamp_(min=1))
            ids = found.token_ids[:, :kept].contiguous()
            times = exponential(columns.seed, batch.positions[rows], Purpose.SAMPLE, ids)
            winners = race(found.logits[:, :kept], times)[:, None]
            token_ids[rows] = ids.gather(1, winners).squeeze(1)
            again = found.complete.logical_not().nonzero().squeeze(1)
            rows, scaled, columns = rows[again], scaled[again], columns.select(again)
            width *= GROWTH


def race(scaled: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """The column that wins in each row: the largest probability / time.

    Args:
        scaled: [num_rows, n] log-probabilities up to a constant of the row, largest near 0.
        times: [num_rows, n] exponential draws, overwritten.

    Returns:
        [num_rows] int64. A token of probability 0 never wins while another has more.
    """
    return torch.div(scaled.exp(), times, out=times).argmax(-1)
