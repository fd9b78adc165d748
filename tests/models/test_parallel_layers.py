"""Layers split over the ranks of a pretended group equal the layer on one rank."""

from typing import Any

import pytest
import torch

from nanoserve.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from nanoserve.layers.linear import (
    ColumnParallelLinear,
    GateUpParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from nanoserve.layers.weights import fill_slots, weight_slots


class OneOf:
    """Rank `rank` of `size`; sums and gathers are left to the test."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return tensor


def filled(layer: torch.nn.Module, weights: dict[str, torch.Tensor]) -> Any:
    """The layer as the only child of a module, filled from checkpoint names below it."""
    holder = torch.nn.Module()
    holder.layer = layer
    fill_slots(holder, weights.items())
    return layer


@pytest.mark.parametrize("size", [1, 2, 4])
def test_PA1_heads_split_over_ranks_and_kv_heads_shared(size: int) -> None:
    hidden, head_dim, heads, kv_heads = 12, 6, 8, 2
    weights = {
        "q_proj.weight": torch.randn(heads * head_dim, hidden),
        "k_proj.weight": torch.randn(kv_heads * head_dim, hidden),
        "v_proj.weight": torch.randn(kv_heads * head_dim, hidden),
        "q_proj.bias": torch.randn(heads * head_dim),
        "k_proj.bias": torch.randn(kv_heads * head_dim),
        "v_proj.bias": torch.randn(kv_heads * head_dim),
    }
    x = torch.randn(5, hidden)
    full = {
        n: x @ weights[f"{n}.weight"].T + weights[f"{n}.bias"]
        for n in ("q_proj", "k_proj", "v_proj")
    }
    for rank in range(size):
        group = OneOf(rank, size)
        layer = filled(
            QKVParallelLinear(hidden, head_dim, heads, kv_heads, bias=True, group=group), weights
        )
        out = layer(x).view(5, -1, head_dim)
        q, k, v = out.split((layer.num_heads, layer.num_kv_heads, layer.num_kv_heads), dim=1)
        first = rank * heads // size
        assert torch.allclose(
            q, full["q_proj"].view(5, heads, head_dim)[:, first : first + heads // size], atol=1e-5
        )
        # Every query head must meet the KV head it met on one rank.
        own = sorted({(first + i) * kv_heads // heads for i in range(layer.num_heads)})
        assert torch.allclose(k, full["k_proj"].view(5, kv_heads, head_dim)[:, own], atol=1e-5)
        assert torch.allclose(v, full["v_proj"].view(5, kv_heads, head_dim)[:, own], atol=1e-5)


def test_PA1_column_then_row_sums_to_the_whole_with_the_bias_once() -> None:
    up, down, bias = torch.randn(8, 6), torch.randn(6, 8), torch.randn(6)
    x = torch.randn(3, 6)
    total = torch.zeros(3, 6)
    for rank in range(2):
        group = OneOf(rank, 2)
        column = filled(ColumnParallelLinear(6, 8, "up", group=group), {"up.weight": up})
        row = filled(
            RowParallelLinear(8, 6, bias=True, group=group),
            {"layer.weight": down, "layer.bias": bias},
        )
        total += row(column(x))
    assert torch.allclose(total, x @ up.T @ down.T + bias, atol=1e-4)


def test_gate_and_up_keep_their_halves_on_each_rank() -> None:
    gate, up, x = torch.randn(8, 6), torch.randn(8, 6), torch.randn(3, 6)
    for rank in range(2):
        layer = filled(
            GateUpParallelLinear(6, 8, group=OneOf(rank, 2)),
            {"gate_proj.weight": gate, "up_proj.weight": up},
        )
        rows = slice(4 * rank, 4 * rank + 4)
        expected = torch.cat((x @ gate[rows].T, x @ up[rows].T), dim=-1)
        assert torch.allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [12, 13])
def test_PA1_vocabulary_split_over_ranks(vocab_size: int) -> None:
    table, ids, hidden = torch.randn(vocab_size, 6), torch.arange(vocab_size), torch.randn(2, 6)
    vectors, logits = torch.zeros(vocab_size, 6), []
    for rank in range(3):
        group = OneOf(rank, 3)
        weights = {"layer.weight": table}
        vectors += filled(VocabParallelEmbedding(vocab_size, 6, group), weights)(ids)
        logits.append(filled(ParallelLMHead(vocab_size, 6, group), weights)(hidden))
    assert torch.equal(vectors, table)
    gathered = torch.cat(logits, dim=-1)[:, :vocab_size]
    assert torch.allclose(gathered, hidden @ table.T, atol=1e-5)


def test_what_cannot_be_split_is_refused() -> None:
    with pytest.raises(ValueError, match="attention heads"):
        QKVParallelLinear(12, 6, 6, 2, group=OneOf(0, 4))


def test_slots_cover_every_parameter_once() -> None:
    layer = QKVParallelLinear(12, 6, 8, 2, bias=True)
    slots = weight_slots(layer)
    assert set(slots) == {f"{p}_proj.{k}" for p in "qkv" for k in ("weight", "bias")}
    assert sum(s.target.numel() for s in slots.values()) == sum(
        p.numel() for p in layer.parameters()
    )
