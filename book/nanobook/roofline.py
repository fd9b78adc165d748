"""The two limits of a machine, measured, and the roof they make.

A step of a model cannot read memory faster than the machine does, nor multiply faster: which of the
two it waits for is told by its operations per byte (the roofline model of Williams, Waterman and
Patterson 2009). This module must not know what a model or a step is; whoever calls it counts the
operations and the bytes.

    machine = roofline.measure()
    roofline.draw(ax, machine)
    machine.attainable(operations / moved)
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

READ_BYTES = 2**28
"""Size of the matrix that is read: far more than any cache holds."""

MATRIX_SIZES = (768, 1536)


@dataclass(frozen=True)
class Machine:
    """What one machine can do at most, with the threads that torch has.

    Attributes:
        bytes_per_second: reading from memory.
        ops_per_second: multiplications and additions of matrix products in fp32, each counted.
    """

    bytes_per_second: float
    ops_per_second: float

    @property
    def ridge(self) -> float:
        """Operations per byte at which both limits bind; below it memory alone does."""
        return self.ops_per_second / self.bytes_per_second

    def attainable(self, intensity: float) -> float:
        """Operations per second that work of `intensity` operations per byte can reach."""
        return min(self.ops_per_second, intensity * self.bytes_per_second)


def measure(repeats: int = 5) -> Machine:
    """Measure this machine's limits in fp32 on the CPU; about two seconds.

    The best of several kinds of reading and of multiplying counts, and of each the best try: a
    limit is what nothing exceeds, and other work on the machine only slows things down.
    """
    reading = max(READ_BYTES / best_seconds(run, repeats) for run in _readers())
    multiplying = max(operations / best_seconds(run, repeats) for operations, run in _multipliers())
    return Machine(reading, multiplying)


def best_seconds(run: Callable[[], Any], repeats: int) -> float:
    """The fastest of `repeats` runs, after one that does not count."""
    run()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        best = min(best, time.perf_counter() - start)
    return best


def draw(ax: "Axes", machine: Machine, intensities: tuple[float, float] = (0.25, 256.0)) -> None:
    """Draw the roof: operations per byte against the share of the best operations per second.

    Both axes are logarithmic in base 2, so that the slope is straight and halves can be read off.
    """
    from nanobook import style

    low, high = intensities
    corners = [low, min(max(machine.ridge, low), high), high]
    roof = [machine.attainable(x) / machine.ops_per_second for x in corners]
    ax.plot(corners, roof, color=style.INK, linestyle="-", marker="", linewidth=2.6)
    ax.axvline(machine.ridge, color=style.MUTED, linestyle=":", marker="", linewidth=1.2)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set(
        xlim=intensities,
        ylim=(roof[0] / 2, 1.6),
        xlabel="operations per byte",
        ylabel="share of the best speed",
    )
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.yaxis.set_major_formatter(lambda value, _: f"1/{1 / value:.0f}" if value < 1 else "1")


def _readers() -> Iterator[Callable[[], Any]]:
    import torch

    matrix = torch.ones(READ_BYTES // 4 // 4096, 4096)
    vector = torch.ones(4096)
    yield matrix.sum
    yield partial(torch.mv, matrix, vector)


def _multipliers() -> Iterator[tuple[int, Callable[[], Any]]]:
    import torch

    for size in MATRIX_SIZES:
        left, right = torch.ones(size, size), torch.ones(size, size)
        operations = 2 * size**3
        yield operations, partial(torch.mm, left, right)
        if (packed := _packed(right)) is not None:
            yield operations, partial(packed, left)


def _packed(weight: Any) -> Callable[[Any], Any] | None:
    """The product by a weight in oneDNN's own order, where torch offers it."""
    import torch

    ops = torch.ops.mkldnn
    if not (
        torch.backends.mkldnn.is_available()
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
    ):
        return None
    ordered = ops._reorder_linear_weight(weight)
    return lambda x: ops._linear_pointwise(x, ordered, None, "none", [], "")
