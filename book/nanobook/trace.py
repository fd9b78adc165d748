"""What a server did, step by step: noted by the server itself, and drawn beside the client's clock.

`record` is a plugin of the engine: it stands in for the scheduler and notes when each step began
and ended and how many tokens of which request were in it. The client notes when each piece of text
came. Both read time.monotonic(), which all processes of one machine share, so their notes fit.
This module must not import the engine: the engine imports it.

    with Server(env=trace.recording("steps.jsonl")) as server:
        life = trace.Life("A", sent=time.monotonic())
        ...
    steps = trace.read("steps.jsonl")
    trace.draw_life(ax, life, steps)
"""

import importlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch

VARIABLE = "NANOBOOK_TRACE"


# -- in the engine's process ----------------------------------------------------------------------


def recording(file: str | Path) -> dict[str, str]:
    """Environment variables that make a server note its steps in a file."""
    Path(file).unlink(missing_ok=True)
    return {"NANOSERVE_PLUGINS": f"{__name__}:record", VARIABLE: str(Path(file).resolve())}


def record() -> None:
    """The plugin: every scheduler that the engine can choose notes its steps."""
    schedulers = importlib.import_module("nanoserve.scheduler").SCHEDULERS
    for name in schedulers.names():
        schedulers.register(name, _noting(schedulers.load(name)))


def _noting(scheduler: Any) -> Any:
    class Noting(scheduler):
        """The scheduler, with a line in a file for each step that has tokens."""

        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self._began: dict[int, float] = {}

        def schedule(self) -> Any:
            began = time.monotonic()
            output = super().schedule()
            self._began[id(output)] = began
            return output

        def update_from_output(self, scheduler_output: Any, *rest: Any) -> Any:
            result = super().update_from_output(scheduler_output, *rest)
            began, tokens = (
                self._began.pop(id(scheduler_output)),
                scheduler_output.num_scheduled_tokens,
            )
            if tokens:
                prompts = {
                    new.request_id: new.num_prompt_tokens - new.num_computed_tokens
                    for new in scheduler_output.scheduled_new_reqs
                }
                _append(start=began, end=time.monotonic(), tokens=tokens, prompts=prompts)
            return result

    return Noting


def _append(**line: Any) -> None:
    with open(os.environ[VARIABLE], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


# -- in the notebook ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """One step of the engine.

    Attributes:
        start, end: time.monotonic() when it was planned, and when its tokens were known.
        tokens: the engine's request id -> tokens computed in it.
        prompts: prompt tokens that the requests which it began still had to read.
    """

    start: float
    end: float
    tokens: dict[str, int]
    prompts: dict[str, int]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


@dataclass
class Life:
    """One request as its client saw it.

    Attributes:
        name: what to call it in a figure.
        sent: time.monotonic() when it was sent.
        id: the id that the server gave it.
        chunks: (time, text) of each piece of text that came.
        num_tokens: tokens of the reply, as the server counted them.
    """

    name: str
    sent: float
    id: str = ""
    chunks: list[tuple[float, str]] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def text(self) -> str:
        """The whole reply."""
        return "".join(text for _, text in self.chunks)

    @property
    def ttft(self) -> float:
        """Time to first token, seconds."""
        return self.chunks[0][0] - self.sent

    @property
    def tpot(self) -> float:
        """Time per output token after the first, seconds."""
        return (self.chunks[-1][0] - self.chunks[0][0]) / (self.num_tokens - 1)

    @property
    def seconds(self) -> float:
        """From sending to the last piece."""
        return self.chunks[-1][0] - self.sent

    def tokens_in(self, step: Step) -> int:
        """Tokens of this request that a step computed."""
        # The engine's id is the API's, with a tail that makes it unique.
        return sum(n for name, n in step.tokens.items() if name.startswith(f"{self.id}-"))

    def steps(self, steps: Sequence[Step]) -> list[tuple[Step, bool]]:
        """The steps that computed for it, each with whether it was still reading the prompt."""
        mine, seen, prompt = [], 0, 0
        for step in steps:
            if tokens := self.tokens_in(step):
                prompt += sum(
                    n for name, n in step.prompts.items() if name.startswith(f"{self.id}-")
                )
                mine.append((step, seen < prompt))
                seen += tokens
        return mine


def read(file: str | Path) -> list[Step]:
    """The steps noted so far."""
    lines = Path(file).read_text(encoding="utf-8").splitlines()
    return [Step(**json.loads(line)) for line in lines]


# -- drawn ----------------------------------------------------------------------------------------


def draw_life(ax: "Axes", life: Life, steps: Sequence[Step], unit: float) -> None:
    """One request from top to bottom: waiting, the steps of the engine, what the client saw.

    Args:
        ax: where to draw.
        life: the request.
        steps: the server's.
        unit: seconds that count as 1 on the axis of time.
    """
    from nanobook import style

    mine = life.steps(steps)

    def bar(row: int, start: float, end: float, **look: Any) -> None:
        ax.barh(row, (end - start) / unit, left=(start - life.sent) / unit, height=0.6, **look)

    bar(0, life.sent, mine[0][0].start, **_waiting_look())
    for step, reads_prompt in mine:
        row, color = (1, style.COLORS.navy) if reads_prompt else (2, style.COLORS.orange)
        bar(row, step.start, step.end, facecolor=color, edgecolor="white", linewidth=0.8)
    times = [(when - life.sent) / unit for when, _ in life.chunks]
    ax.plot(times, [3] * len(times), linestyle="", marker="|", markersize=14, color=style.INK)
    ax.set(yticks=range(4), yticklabels=["arrival, queue", "prefill", "decode", "text arrives"])
    ax.set(ylim=(3.6, -0.6), xlim=(0, times[-1] * 1.02))
    ax.grid(axis="y", visible=False)


def draw_lives(
    ax: "Axes",
    lives: Sequence[Life],
    steps: Sequence[Step],
    unit: float,
    until: float | None = None,
) -> None:
    """Requests as rows: hatched while they wait, dark in prefill, light with a tick a decode step.

    Args:
        ax: where to draw.
        lives: the requests, the first at the top.
        steps: the server's.
        unit: seconds that count as 1 on the axis of time, which begins with the first request.
        until: end of the axis, in units; all of it by default.
    """
    from nanobook import style

    begin = min(life.sent for life in lives)

    def bars(row: int, spans: list[tuple[float, float]], **look: Any) -> None:
        ranges = [((start - begin) / unit, (end - start) / unit) for start, end in spans]
        ax.broken_barh(ranges, (row - 0.32, 0.64), **look)

    for row, life in enumerate(lives):
        mine = life.steps(steps)
        bars(row, [(life.sent, mine[0][0].start)], **_waiting_look())
        for reads_prompt, color in ((True, style.COLORS.navy), (False, style.COLORS.orange)):
            spans = [(step.start, step.end) for step, reads in mine if reads == reads_prompt]
            bars(row, spans, facecolor=color, edgecolor="white", linewidth=0.5)
    end = max(life.chunks[-1][0] for life in lives)
    ax.set(yticks=range(len(lives)), yticklabels=[life.name for life in lives])
    ax.set(ylim=(len(lives) - 0.4, -0.6), xlim=(0, until or (end - begin) / unit * 1.01))
    ax.grid(axis="y", visible=False)
    ax.legend(handles=legend_handles(), loc="lower center", bbox_to_anchor=(0.45, 1.0), ncols=3)


def legend_handles() -> "list[Patch]":
    """What the looks of `draw_lives` mean, for a legend of its own."""
    from matplotlib.patches import Patch

    from nanobook import style

    return [
        Patch(label="waits", **_waiting_look()),
        Patch(label="prefill", facecolor=style.COLORS.navy),
        Patch(label="decode", facecolor=style.COLORS.orange),
    ]


def _waiting_look() -> dict[str, Any]:
    from nanobook import style

    return {"facecolor": "white", "edgecolor": style.COLORS.slate, "hatch": "///"}
