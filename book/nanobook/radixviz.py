"""A tree of token rows, drawn: an edge is a bar as long as its tokens, a row a path to the right.

It draws what it is given, edges with a label and a number of tokens, and marks where blocks end:
the tokens of a bar that lie behind its last whole block are hatched, since a cache of whole blocks
cannot share them. This module must not know how a tree is built, or what its tokens mean.

    tree = [Edge("You are a guide.", 40, (Edge("When?", 12), Edge("Where?", 9)))]
    fig, ax = style.figure(height=radixviz.height(tree))
    radixviz.draw(ax, tree, block_size=16)
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from nanobook import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW_INCHES = 0.52
CHARACTERS = 54
"""How many characters of a label fit over the whole width."""

_BAR = 0.34  # of a row


@dataclass(frozen=True)
class Edge:
    """Tokens between two places where rows part.

    Attributes:
        label: what they say; cut to the length of the bar.
        num_tokens: how many they are.
        children: what follows, each beginning with another token.
        marked: whether it lies on the path that the reader is to look at.
    """

    label: str
    num_tokens: int
    children: tuple["Edge", ...] = ()
    marked: bool = False


@dataclass(frozen=True)
class Bar:
    """An edge in its place.

    Attributes:
        start: tokens before it.
        row: 0 is the topmost.
        parent_row: the row of the edge that it continues.
        whole: how many of its tokens lie in blocks that end inside it or before it; those behind
            them are shared by a tree alone, if rows part at its end.
    """

    edge: Edge
    start: int
    row: int
    parent_row: int
    whole: int


def num_rows(edges: Sequence[Edge]) -> int:
    """How many paths the tree has, each drawn on a row of its own."""
    return sum(max(1, num_rows(edge.children)) for edge in edges)


def height(edges: Sequence[Edge]) -> float:
    """Inches that a figure of this tree needs."""
    return ROW_INCHES * max(2, num_rows(edges)) + 0.9


def place(edges: Sequence[Edge], block_size: int) -> list[Bar]:
    """Where each edge goes: parents before their children, the first child on its parent's row."""
    return list(_place(edges, 0, 0, 0, block_size))


def _place(
    edges: Sequence[Edge], start: int, row: int, parent_row: int, block_size: int
) -> Iterator[Bar]:
    for edge in edges:
        end = start + edge.num_tokens
        whole = max(0, end // block_size * block_size - start)
        yield Bar(edge, start, row, parent_row, whole)
        yield from _place(edge.children, end, row, row, block_size)
        row += max(1, num_rows(edge.children))


def draw(ax: "Axes", edges: Sequence[Edge], block_size: int, width: int | None = None) -> None:
    """Draw the tree from left to right over an axis of tokens.

    Args:
        ax: the axes to fill.
        edges: what follows the root.
        block_size: where blocks end; the end of each is a thin line in the bar.
        width: tokens that the axis holds; by default as many as the longest path has.
    """
    from matplotlib.patches import Rectangle

    bars = place(edges, block_size)
    width = width or max((bar.start + bar.edge.num_tokens for bar in bars), default=1)
    for bar in bars:
        end, top = bar.start + bar.edge.num_tokens, -bar.row
        color = style.COLORS.orange if bar.edge.marked else style.COLORS.navy
        if bar.parent_row != bar.row:
            line: dict[str, Any] = {"color": style.MUTED, "lw": 1.4, "ls": "-", "marker": ""}
            ax.plot([bar.start] * 2, [-bar.parent_row, top + _BAR / 2], **line, zorder=0)
        for left, right, hatch in (
            (bar.start, bar.start + bar.whole, ""),
            (bar.start + bar.whole, end, "////" if bar.edge.children else ""),
        ):
            if left == right:
                continue
            look: dict[str, Any] = {"facecolor": style.PAPER if hatch else color, "hatch": hatch}
            ax.add_patch(
                Rectangle((left, top), right - left, _BAR, edgecolor=color, lw=1.2, **look)
            )
        for at in range(-(-(bar.start + 1) // block_size) * block_size, end, block_size):
            ax.plot([at, at], [top, top + _BAR], color=style.PAPER, lw=0.8, ls="-", marker="")
        # Nothing stands to the right of a leaf.
        room = bar.edge.num_tokens if bar.edge.children else width - bar.start
        label = _cut(bar.edge.label, int(room / width * CHARACTERS) - 1)
        ax.text(bar.start, top + _BAR + 0.06, label, fontsize=style.SMALL, va="bottom")
    rows = max(2, num_rows(edges))
    ax.set(xlim=(0, width), ylim=(-rows + 0.8, 1.0), yticks=[], xlabel="tokens from the beginning")
    ax.grid(False)
    ax.spines["left"].set_visible(False)


def _cut(label: str, length: int) -> str:
    label = " ".join(label.split())
    if len(label) <= length:
        return label
    return label[: length - 1] + "…" if length > 3 else ""
