"""One permanent row a request: what the worker must know of it, where the next step will read it.

A request keeps its row from its first step to its last, so nothing moves when others come and go; a
small index maps a step's order to rows. Known tokens and sampling settings lie on the device, and a
sampled token is written to its row there: the next step's input is gathered without asking the
host. Only counts are kept on the host as well. This module must not know schedules or blocks.
"""

from dataclasses import dataclass

import torch

from nanoserve.sampling.sampler import SamplingColumns
from nanoserve.sampling_params import SamplingParams
from nanoserve.scheduler_output import NewRequestData


@dataclass
class RequestState:
    """The host's part of a row.

    Attributes:
        num_tokens: known tokens (prompt and output, no drafts).
        end_token_ids: every token that may end the request; min_tokens holds them back.
    """

    request_id: str
    params: SamplingParams
    num_prompt_tokens: int
    num_tokens: int
    end_token_ids: list[int]

    @property
    def min_length(self) -> int:
        """Known tokens below which no end token may be chosen."""
        return self.num_prompt_tokens + self.params.min_tokens


class RequestRows:
    """All rows.

    Args:
        num_rows: most requests at once.
        max_model_len: most tokens a request may have.
        device: where tokens and columns live.

    Attributes:
        token_ids: [num_rows, max_model_len] int32, a row's known tokens from the left.
        columns: the sampling settings, by row.
        index: request id -> row.
        version: changes whenever a row gets or loses its request.
    """

    def __init__(self, num_rows: int, max_model_len: int, device: torch.device) -> None:
        self.token_ids = torch.zeros(num_rows, max_model_len, dtype=torch.int32, device=device)
        self.columns = SamplingColumns(num_rows, device)
        self.index: dict[str, int] = {}
        self.version = 0
        self._states: list[RequestState | None] = [None] * num_rows
        self._free = list(range(num_rows - 1, -1, -1))

    def __len__(self) -> int:
        """Requests that have a row."""
        return len(self.index)

    def state(self, row: int) -> RequestState:
        """The host's part of a row that is taken."""
        state = self._states[row]
        if state is None:
            raise KeyError(f"row {row} holds no request")
        return state

    def add(self, request: NewRequestData) -> int:
        """Give a request a row and fill it.

        Raises:
            ValueError: it has a row already, or none is free, or it has more tokens than a row.
                Nothing has been changed then.
        """
        num_tokens, width = len(request.token_ids), self.token_ids.shape[1]
        if request.request_id in self.index:
            raise ValueError(f"request {request.request_id} has a row already")
        if not self._free:
            raise ValueError(f"all {len(self._states)} rows are taken")
        if num_tokens > width:
            raise ValueError(f"{num_tokens} tokens do not fit a row of {width}")
        tokens = torch.tensor(request.token_ids, dtype=torch.int32)
        row = self._free.pop()
        self.token_ids[row, :num_tokens] = tokens
        self.columns.write(row, request.sampling_params, request.seed)
        end_tokens = {*request.eos_token_ids, *request.sampling_params.stop_token_ids}
        self._states[row] = RequestState(
            request.request_id,
            request.sampling_params,
            request.num_prompt_tokens,
            num_tokens,
            sorted(end_tokens),
        )
        self.index[request.request_id] = row
        self.version += 1
        return row

    def remove(self, request_id: str) -> int | None:
        """Free a request's row and return it; None if it had none."""
        row = self.index.pop(request_id, None)
        if row is not None:
            self._states[row] = None
            self._free.append(row)
            self.version += 1
        return row

    def write(self, rows: torch.Tensor, places: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Write tokens on the device: all three [n] int64, `places` counted from a row's start."""
        flat = rows * self.token_ids.shape[1] + places
        self.token_ids.view(-1)[flat] = token_ids.to(torch.int32)

    def gather(self, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Read tokens: [n] int64 each, returns [n] int64."""
        return self.token_ids.view(-1)[rows * self.token_ids.shape[1] + places].to(torch.int64)
