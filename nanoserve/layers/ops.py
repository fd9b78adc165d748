"""Operations that have more than one implementation, by name.

A layer looks its operation up here once, when it is made, for the device it is made on. The torch
implementation beside each layer is registered under "torch" and is the reference; faster ones
register under their device's name ("cuda") and win there. Nothing is imported before it is used.
"""

from collections.abc import Callable
from typing import Any

import torch

from nanoserve.registry import Registry

_LAYERS = "nanoserve.layers"

OPS: dict[str, Registry] = {
    "rms_norm": Registry("rms_norm implementation", {"torch": f"{_LAYERS}.norm:rms_norm"}),
    "fused_add_rms_norm": Registry(
        "fused_add_rms_norm implementation", {"torch": f"{_LAYERS}.norm:fused_add_rms_norm"}
    ),
    "linear": Registry(
        "linear implementation",
        {"torch": f"{_LAYERS}.gemm:PlainProduct", "cpu": f"{_LAYERS}.gemm:cpu_product"},
    ),
    "rotary_embedding": Registry(
        "rotary_embedding implementation", {"torch": f"{_LAYERS}.rotary:rotary_embedding"}
    ),
    "silu_and_mul": Registry(
        "silu_and_mul implementation", {"torch": f"{_LAYERS}.activation:silu_and_mul"}
    ),
}


def get_op(name: str, device: torch.device | None = None) -> Callable[..., Any]:
    """The implementation of `name` for a device (default: the current default device).

    Raises:
        KeyError: no operation of that name.
    """
    registry = OPS[name]
    kind = (device or torch.get_default_device()).type
    return registry.load(kind if kind in registry else "torch")
