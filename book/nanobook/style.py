"""How the course's figures look: readable in grey, in dark mode, and on a phone.

Every series is told apart by its dashes and marker, and every bar by its hatch, before its colour
is looked at. Figures are `WIDTH` inches wide and their smallest type is `SMALL` points, so that it
is still nine pixels high where a page is 360 pixels wide. This module must not know what is drawn.

    from nanobook import style

    style.use()
    fig, ax = style.figure(height=3)
    for line, (name, seconds) in zip(style.line_styles(), series):
        ax.plot(sizes, seconds, label=name, **line)
    style.note(fig, "Measured on this machine, one thread.")
"""

import sys
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from matplotlib.figure import Figure

WIDTH = 6.4  # inches: what the book's text column holds without scaling
BASE = 14.0  # points
SMALL = 13.0


class Colors(NamedTuple):
    """The colours, darkest contrast first: the first four also differ as greys.

    Each stands out from white by 3:1 or more.
    """

    navy: str = "#17365c"
    orange: str = "#d3780c"
    teal: str = "#127a74"
    plum: str = "#8a2d6b"
    slate: str = "#7f8c99"
    red: str = "#b5392b"


COLORS = Colors()
INK = "#1c2126"  # text and axes
MUTED = "#59626b"  # notes, and what should stand back
GRID = "#d9dde1"
PAPER = "#ffffff"
DASHES: "Sequence[Any]" = ("-", "--", ":", "-.", (0, (1, 1)), (0, (6, 2, 1, 2, 1, 2)))
MARKERS = ("o", "s", "^", "D", "v", "X")
HATCHES = ("", "///", "...", "xxx", "---", "ooo")


def use(image: str = "svg") -> None:
    """Set matplotlib up, and the notebook's figures with it.

    Args:
        image: "svg", which is sharp at any size, or "png" for figures of very many marks.
    """
    import matplotlib
    from cycler import cycler

    if image not in ("svg", "png"):
        raise ValueError(f"image must be 'svg' or 'png', not {image!r}")
    lines = cycler(color=COLORS) + cycler(linestyle=DASHES) + cycler(marker=MARKERS)
    matplotlib.rcParams.update(
        {
            "figure.figsize": (WIDTH, 3.6),
            "figure.dpi": 96,
            "figure.facecolor": PAPER,
            "figure.constrained_layout.use": True,
            "figure.constrained_layout.h_pad": 0.06,
            "savefig.facecolor": PAPER,
            "savefig.dpi": 192,
            "svg.hashsalt": "nanobook",
            "font.family": "DejaVu Sans",
            "font.size": BASE,
            "text.color": INK,
            "axes.facecolor": PAPER,
            "axes.edgecolor": INK,
            "axes.labelcolor": INK,
            "axes.labelsize": BASE,
            "axes.titlesize": BASE,
            "axes.titlelocation": "left",
            "axes.titleweight": "bold",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.axisbelow": True,
            "axes.grid": True,
            "axes.prop_cycle": lines,
            "grid.color": GRID,
            "grid.linewidth": 0.8,
            "lines.linewidth": 2.2,
            "lines.markersize": 6,
            "hatch.linewidth": 1.2,
            "legend.fontsize": SMALL,
            "legend.frameon": False,
            "legend.handlelength": 3.8,
            "xtick.labelsize": SMALL,
            "ytick.labelsize": SMALL,
            "xtick.color": INK,
            "ytick.color": INK,
        }
    )
    if "IPython" in sys.modules and sys.modules["IPython"].get_ipython() is not None:
        _set_notebook_format(image)


def _set_notebook_format(image: str) -> None:
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    # Not cut to what is drawn, so that type has one size in all figures; no date, so that the same
    # figure is the same bytes.
    options: dict[str, Any] = {"bbox_inches": None}
    if image == "svg":
        options["metadata"] = {"Date": None}
    set_matplotlib_formats("retina" if image == "png" else image, **options)


def figure(
    height: float = 3.6, rows: int = 1, columns: int = 1, **subplots: Any
) -> "tuple[Figure, Any]":
    """A figure as wide as the text, and its axes (an array of them if there are several).

    Args:
        height: inches.
        rows: of axes; on a phone, rows read better than columns.
        columns: of axes.
        subplots: goes to `matplotlib.pyplot.subplots` (`sharex`, `height_ratios`, ...).
    """
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=(WIDTH, height), **subplots)


def line_styles() -> "Iterator[dict[str, Any]]":
    """Keywords for `ax.plot`, one dict a series; they begin anew after six."""
    for color, dashes, marker in cycle(zip(COLORS, DASHES, MARKERS, strict=True)):
        yield {"color": color, "linestyle": dashes, "marker": marker}


def bar_styles() -> "Iterator[dict[str, Any]]":
    """Keywords for `ax.bar`, `ax.barh` and `ax.fill_between`, one dict a series."""
    for color, hatch in cycle(zip(COLORS, HATCHES, strict=True)):
        yield {"facecolor": color, "hatch": hatch, "edgecolor": PAPER}


def note(fig: "Figure", text: str) -> None:
    """Say under the figure where its numbers come from, in one short line."""
    fig.supxlabel(text, x=0.01, ha="left", fontsize=SMALL, color=MUTED)
