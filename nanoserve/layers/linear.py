"""Matrix products, fused where their inputs are the same and split over a group's ranks.

Query, key and value projections read one input, so they are one product; so are gate and up. Over
ranks, a column-parallel layer splits its outputs and a row-parallel one its inputs, so that the
pair needs one sum over ranks and nothing in between (Megatron-LM, Shoeybi et al. 2019).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from nanoserve.layers.gemm import LinearProduct
from nanoserve.layers.group import ParallelGroup, SingleRank, shard
from nanoserve.layers.ops import get_op
from nanoserve.layers.weights import WeightSlot


class LinearBase(nn.Module):
    """A weight, perhaps a bias, and the product that uses them.

    Attributes:
        weight: [output_size, input_size]; empty once the product keeps a copy of its own.
        bias: [output_size] or None.
    """

    def __init__(self, input_size: int, output_size: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(output_size, input_size), requires_grad=False)
        self.bias = nn.Parameter(torch.empty(output_size), requires_grad=False) if bias else None
        self._product: LinearProduct | None = None

    @property
    def product(self) -> LinearProduct:
        """The product; made when it is first asked for if loading has not made it."""
        if self._product is None:
            self.process_weights_after_loading()
        assert self._product is not None
        return self._product

    def process_weights_after_loading(self) -> None:
        """Bring the loaded weight into the form this device multiplies fastest."""
        self._product = get_op("linear", self.weight.device)(self.weight)
        if not self._product.keeps_weight:
            self.weight.data = self.weight.data.new_empty(0)


@dataclass
class Part:
    """One checkpoint projection inside a fused layer.

    Attributes:
        name: what the checkpoint calls it ("q_proj").
        total: its output rows in the checkpoint.
        start, size: the rows that this rank holds.
    """

    name: str
    total: int
    start: int
    size: int


class MergedColumnParallelLinear(LinearBase):
    """Several projections of one input as one product; outputs side by side, split over ranks.

    Args:
        input_size: columns.
        parts: the projections, in the order of the outputs.
        bias: whether each adds one.
    """

    def __init__(self, input_size: int, parts: Sequence[Part], bias: bool = False) -> None:
        super().__init__(input_size, sum(part.size for part in parts), bias)
        self.parts = list(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, input_size] -> [num_tokens, sum of this rank's part sizes]."""
        return self.product(x, self.bias)

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        """One slot a part, called as if the parts stood beside this layer."""
        parent = name.rpartition(".")[0]
        slots, row = {}, 0
        for part in self.parts:
            for key, parameter in (("weight", self.weight), ("bias", self.bias)):
                if parameter is not None:
                    target = parameter.data[row : row + part.size]
                    shape = (part.total, *parameter.shape[1:])
                    full_name = f"{parent}.{part.name}.{key}" if parent else f"{part.name}.{key}"
                    slots[full_name] = WeightSlot(target, shape, 0, part.start)
            row += part.size
        return slots


class GateUpParallelLinear(MergedColumnParallelLinear):
    """The MLP's gate and up projections: [num_tokens, hidden] -> gates, then ups."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        bias: bool = False,
        group: ParallelGroup | None = None,
    ) -> None:
        start, size = shard(intermediate_size, group or SingleRank(), "MLP columns")
        parts = [Part(name, intermediate_size, start, size) for name in ("gate_proj", "up_proj")]
        super().__init__(hidden_size, parts, bias)


class QKVParallelLinear(MergedColumnParallelLinear):
    """The attention's query, key and value projections, split over ranks by heads.

    With fewer KV heads than ranks, several ranks hold a copy of the same head.

    Attributes:
        num_heads, num_kv_heads: the heads that this rank holds.
    """

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool = False,
        group: ParallelGroup | None = None,
    ) -> None:
        group = group or SingleRank()
        q_start, self.num_heads = shard(num_heads, group, "attention heads")
        if group.size > num_kv_heads:
            if group.size % num_kv_heads:
                raise ValueError(f"{group.size} ranks cannot share {num_kv_heads} KV heads evenly")
            kv_start, self.num_kv_heads = group.rank * num_kv_heads // group.size, 1
        else:
            kv_start, self.num_kv_heads = shard(num_kv_heads, group, "KV heads")
        q_part = Part("q_proj", num_heads * head_dim, q_start * head_dim, self.num_heads * head_dim)
        kv_parts = [
            Part(name, num_kv_heads * head_dim, kv_start * head_dim, self.num_kv_heads * head_dim)
            for name in ("k_proj", "v_proj")
        ]
        super().__init__(hidden_size, [q_part, *kv_parts], bias)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """One projection whose outputs are split over ranks; `name` is what the checkpoint calls it."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        name: str,
        bias: bool = False,
        group: ParallelGroup | None = None,
    ) -> None:
        start, size = shard(output_size, group or SingleRank(), "outputs")
        super().__init__(input_size, [Part(name, output_size, start, size)], bias)


class RowParallelLinear(LinearBase):
    """A projection whose inputs are split over ranks; the outputs are summed over them."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        group: ParallelGroup | None = None,
    ) -> None:
        group = group or SingleRank()
        start, size = shard(input_size, group, "inputs")
        super().__init__(size, output_size, bias)
        self.group, self.input_size, self.start = group, input_size, start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[num_tokens, this rank's inputs] -> [num_tokens, output_size], whole on every rank."""
        # The sum over ranks must count the bias once.
        bias = self.bias if self.group.rank == 0 else None
        return self.group.all_reduce(self.product(x, bias))

    def weight_slots(self, name: str) -> dict[str, WeightSlot]:
        """The weight, split along its inputs, and the bias, whole."""
        full_shape = (self.weight.shape[0], self.input_size)
        slots = {f"{name}.weight": WeightSlot(self.weight.data, full_shape, 1, self.start)}
        if self.bias is not None:
            slots[f"{name}.bias"] = WeightSlot(self.bias.data, tuple(self.bias.shape))
        return slots
