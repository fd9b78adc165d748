"""From a checkpoint's tensor names to the memory they fill.

Fused layers hold several checkpoint tensors in one parameter, and a rank of a group holds a slice
of each. A `WeightSlot` says where one checkpoint tensor goes; `weight_slots` collects a model's
slots under the checkpoint's own names, so that what is missing or unexpected is known exactly.
Files must not be known here.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from nanoserve.errors import ModelLoadError


@dataclass
class WeightSlot:
    """The place of one checkpoint tensor.

    Attributes:
        target: the part of the parameter that it fills (a view).
        full_shape: the tensor's shape in the checkpoint.
        dim: the dimension that is split over ranks; None when every rank holds all of it.
        start: where this rank's slice begins along `dim`.
    """

    target: torch.Tensor
    full_shape: tuple[int, ...]
    dim: int | None = None
    start: int = 0

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Copy this rank's part of `tensor`, cast to the parameter's type.

        Raises:
            ModelLoadError: the shape is not the one config.json implies.
        """
        if tuple(tensor.shape) != self.full_shape:
            raise ModelLoadError(
                f"weight {name!r} has shape {list(tensor.shape)}, but config.json implies "
                f"{list(self.full_shape)}"
            )
        if self.dim is not None:
            tensor = tensor.narrow(self.dim, self.start, self.target.shape[self.dim])
        self.target.copy_(tensor)


def weight_slots(model: nn.Module) -> dict[str, WeightSlot]:
    """Every slot of a model, by checkpoint name.

    A module with a method `weight_slots(name)` names its own; any other parameter is taken to be
    called as it is in the module tree and to be whole on every rank.
    """
    slots: dict[str, WeightSlot] = {}
    for name, module in model.named_modules():
        own = getattr(module, "weight_slots", None)
        if own is not None:
            slots.update(own(name))
            continue
        for key, parameter in module.named_parameters(recurse=False):
            slots[f"{name}.{key}" if name else key] = WeightSlot(
                parameter.data, tuple(parameter.shape)
            )
    return slots


def fill_slots(
    model: nn.Module, weights: Iterable[tuple[str, torch.Tensor]], ignored: Sequence[str] = ()
) -> None:
    """Fill every slot of `model` from (checkpoint name, tensor) pairs, one at a time.

    Args:
        ignored: endings of names that carry nothing the model needs.

    Raises:
        ModelLoadError: a weight is missing, unexpected, or of the wrong shape.
    """
    slots = weight_slots(model)
    missing, unexpected = set(slots), []
    for name, tensor in weights:
        if name in slots:
            slots[name].load(name, tensor)
            missing.discard(name)
        elif not name.endswith(tuple(ignored)):
            unexpected.append(name)
    kind = type(model).__name__
    if missing:
        raise ModelLoadError(f"the weights lack {_some(sorted(missing))}, which {kind} needs")
    if unexpected:
        raise ModelLoadError(f"the weights hold {_some(unexpected)}, unknown to {kind}")


def _some(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
