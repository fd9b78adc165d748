"""The group of ranks that a layer's weights are split over, as the layer sees it.

A layer asks its group three things: how many ranks there are, to add up partial results, and to
put slices side by side. `SingleRank` answers for a group of one; groups over several processes
bring the same methods. What carries the bytes must not be known here.
"""

from typing import Protocol

import torch


class ParallelGroup(Protocol):
    """Ranks that hold slices of the same layer.

    Attributes:
        rank: this process's place in the group, from 0.
        size: ranks in the group.
    """

    rank: int
    size: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, the same on each. May reuse the memory of `tensor`."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Every rank's tensor, concatenated along `dim` in rank order."""
        ...


class SingleRank:
    """A group of one: nothing to add, nothing to gather."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` itself."""
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """`tensor` itself."""
        return tensor


def shard(total: int, group: ParallelGroup, what: str) -> tuple[int, int]:
    """(start, size) of this rank's equal share of `total`.

    Raises:
        ValueError: `total` does not divide by the group's size; `what` names it.
    """
    if total % group.size:
        raise ValueError(f"{total} {what} cannot be split evenly over {group.size} ranks")
    size = total // group.size
    return group.rank * size, size
