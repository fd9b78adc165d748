"""Random paged caches, and dense attention in float64 to compare with."""

import math
from dataclasses import dataclass, field

import torch


@dataclass
class Case:
    """One batch over a paged cache; every slot that no token owns holds NaN.

    Attributes:
        query_lens, past: new tokens and cached tokens of each row.
        window, soft_cap, sinks: options of attention; sinks as a seed or None.
        lost: table entries of pages that lie wholly before the window point at a page of NaN.
    """

    query_lens: list[int]
    past: list[int]
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int | None = None
    soft_cap: float = 0.0
    sinks: bool = False
    shared: bool = False
    lost: bool = False
    seed: int = 0
    device: str = "cpu"
    scale: float = field(init=False)

    def __post_init__(self):
        self.scale = self.head_dim**-0.5
        generator = torch.Generator().manual_seed(self.seed)
        rows = len(self.query_lens)
        self.lengths = [a + b for a, b in zip(self.query_lens, self.past, strict=True)]
        blocks = [-(-length // self.block_size) for length in self.lengths]
        total, most = sum(blocks), max([1, *blocks])
        pages = torch.randperm(total + 3, generator=generator)[:total] + 0
        shape = (2, total + 3, self.num_kv_heads, self.block_size, self.head_dim)
        cache = torch.full(shape, math.nan)
        # Unused entries of the table point at a block of NaN.
        free = sorted(set(range(total + 3)) - set(pages.tolist()))
        table = torch.full((rows, most + 1), free[0], dtype=torch.int32)
        self.keys, self.values = [], []
        given = 0
        for row, count in enumerate(blocks):
            own = pages[given : given + count]
            given += count
            length = self.lengths[row]
            size = (self.num_kv_heads, length, self.head_dim)
            key = torch.randn(size, generator=generator).to(self.dtype).float()
            value = torch.randn(size, generator=generator).to(self.dtype).float()
            if self.shared and row and count > 1 and blocks[row - 1] > 1:
                # The first page is the row before's: a shared prefix.
                own = own.clone()
                own[0] = table[row - 1, 0]
                n = min(self.block_size, length, self.lengths[row - 1])
                key[:, :n], value[:, :n] = self.keys[-1][:, :n], self.values[-1][:, :n]
            table[row, :count] = own.int()
            for token in range(length):
                block, slot = int(table[row, token // self.block_size]), token % self.block_size
                cache[0, block, :, slot] = key[:, token]
                cache[1, block, :, slot] = value[:, token]
            self.keys.append(key)
            self.values.append(value)
            if self.lost and self.window is not None:
                table[row, : max(0, self.past[row] - self.window + 1) // self.block_size] = free[0]
        tokens = sum(self.query_lens)
        size = (tokens, self.num_heads, self.head_dim)
        query = torch.randn(size, generator=generator)
        self.query = query.to(self.dtype).to(self.device)
        self.cache = cache.to(self.dtype).to(self.device)
        self.table = table.to(self.device)
        self.seq_lens = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        starts = [0]
        for length in self.query_lens:
            starts.append(starts[-1] + length)
        self.query_start = torch.tensor(starts, dtype=torch.int32, device=self.device)
        self.sink_logits = (
            torch.randn(self.num_heads, generator=generator).to(self.device) if self.sinks else None
        )

    def expected(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [num_tokens, num_heads, head_dim], lse [num_tokens, num_heads]), float64 on CPU."""
        outs, sums = [], []
        group = self.num_heads // self.num_kv_heads
        query = self.query.double().cpu()
        start = 0
        for row, num_new in enumerate(self.query_lens):
            q = query[start : start + num_new].transpose(0, 1)
            start += num_new
            key = self.keys[row].double().repeat_interleave(group, 0)
            value = self.values[row].double().repeat_interleave(group, 0)
            scores = q @ key.transpose(1, 2) * self.scale
            if self.soft_cap:
                scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
            position = torch.arange(num_new)[:, None] + self.past[row]
            token = torch.arange(self.lengths[row])[None, :]
            seen = token <= position
            if self.window is not None:
                seen &= token > position - self.window
            scores = scores.masked_fill(~seen, -math.inf)
            if self.sink_logits is not None:
                sink = self.sink_logits.double().cpu()[:, None, None].expand(-1, num_new, 1)
                scores = torch.cat((scores, sink), dim=2)
                value = torch.cat((value, torch.zeros_like(value[:, :1])), dim=1)
            sums.append(scores.logsumexp(-1).transpose(0, 1))
            outs.append((scores.softmax(-1) @ value).transpose(0, 1))
        return torch.cat(outs), torch.cat(sums)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative error, norm of the difference over norm of the truth; NaN counts as infinite."""
    found = found.double().cpu()
    if not torch.isfinite(found).all():
        return math.inf
    scale = expected.norm().item()
    return (found - expected).norm().item() / scale if scale else found.norm().item()
