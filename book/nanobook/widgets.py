"""Figures that a reader can drag: controls above, the drawing below.

`explore` takes a function that draws, and one control a parameter. In Jupyter the drawing follows
the controls. Where nothing can follow them (the book: NANOBOOK_STATIC=1), it is a static picture of
the first position, or of the positions that the author chose. This module must not know what is
drawn, nor keep anything between two calls.

    def draw(batch, context):
        fig, ax = style.figure(height=3)
        ...

    widgets.explore(draw, batch=[1, 2, 4, 8], context=widgets.slider(128, 8192, start=2048))
"""

import io
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Draw = Callable[..., Any]


@dataclass(frozen=True)
class Slider:
    """A range of numbers to drag along, both ends included."""

    low: float
    high: float
    start: float
    step: float


def slider(low: float, high: float, *, start: float | None = None, step: float = 1) -> Slider:
    """A slider from `low` to `high`, standing at `start` (by default at `low`)."""
    start = low if start is None else start
    if not low <= start <= high:
        raise ValueError(f"a slider from {low} to {high} cannot start at {start}")
    return Slider(low, high, start, step)


def explore(
    draw: Draw, *, static: Sequence[Mapping[str, Any]] | None = None, **controls: Any
) -> None:
    """Show what `draw` draws, with a control for each of its parameters.

    Args:
        draw: called with one keyword a control; draws a matplotlib figure and leaves it open. If it
            returns a string, that is shown under the figure.
        static: the positions to show in the book, if not the first; a position may leave out
            controls, which then stand where they begin.
        controls: name -> `slider(...)`, or `(low, high)` or `(low, high, step)` for one that starts
            at its low end; a list of numbers (a slider that stops at each), a list of strings (a
            menu), or a bool (a box to tick). Lists start at their first.

    Raises:
        ValueError: a control makes no sense, or `draw` left no figure.
    """
    controls = {name: _control(name, given) for name, given in controls.items()}
    start = {name: _start(control) for name, control in controls.items()}
    if os.environ.get("NANOBOOK_STATIC") == "1":
        _show_static(draw, start, static or [{}])
    else:
        _show_live(draw, controls, start)


def _control(name: str, given: Any) -> Slider | list[Any] | bool:
    if isinstance(given, Slider | bool):
        return given
    if isinstance(given, tuple) and len(given) in (2, 3):
        return slider(given[0], given[1], step=given[2] if len(given) == 3 else 1)
    if isinstance(given, list | range) and len(given):
        return list(given)
    raise ValueError(
        f"{name}={given!r} is no control: give a slider, a list, a bool or (low, high)"
    )


def _start(control: Slider | list[Any] | bool) -> Any:
    if isinstance(control, Slider):
        return control.start
    return control[0] if isinstance(control, list) else control


def _picture(draw: Draw, values: Mapping[str, Any]) -> tuple[bytes, str]:
    """The figure that one call leaves open, as SVG, and the text that the call returned."""
    from matplotlib import pyplot

    before = pyplot.get_fignums()
    try:
        text = draw(**values)
        new = [number for number in pyplot.get_fignums() if number not in before]
        if not new:
            raise ValueError(
                f"{getattr(draw, '__name__', 'draw')} left no figure open: let it make one, and "
                "leave out plt.show()"
            )
        buffer = io.BytesIO()
        pyplot.figure(new[-1]).savefig(buffer, format="svg", metadata={"Date": None})
    finally:
        for number in pyplot.get_fignums():
            if number not in before:
                pyplot.close(number)
    return buffer.getvalue(), text if isinstance(text, str) else ""


def _label(name: str) -> str:
    return name.replace("_", " ")


def _show_static(
    draw: Draw, start: Mapping[str, Any], positions: Sequence[Mapping[str, Any]]
) -> None:
    from IPython.display import SVG, Markdown, display

    for position in positions:
        if unknown := position.keys() - start.keys():
            raise ValueError(f"static names a control that is not there: {', '.join(unknown)}")
        values = {**start, **position}
        picture, text = _picture(draw, values)
        where = ", ".join(f"{_label(name)} = {value}" for name, value in values.items())
        display(SVG(picture))
        display(Markdown(f"*{where}.*{' ' if text else ''}{text}"))
    *others, last = [f"*{_label(name)}*" for name in start]
    moved = f"{', '.join(others)} and {last}" if others else last
    display(Markdown(f"In the notebook you can drag {moved}."))


def _show_live(draw: Draw, controls: Mapping[str, Any], start: Mapping[str, Any]) -> None:
    import ipywidgets  # type: ignore[import-untyped]
    from IPython.display import display

    # The picture is a widget of its own: no output is cleared and written again, so nothing jumps.
    first, text = _picture(draw, start)
    natural = {"max_width": "100%", "align_self": "flex-start"}
    picture = ipywidgets.Image(value=first, format="svg+xml", layout=natural)
    caption = ipywidgets.Label(text)
    handles = {name: _handle(name, control) for name, control in controls.items()}

    def redraw(_: object) -> None:
        try:
            values = {name: handle.value for name, handle in handles.items()}
            picture.value, caption.value = _picture(draw, values)
        except Exception as error:  # there is no cell that could show it
            caption.value = f"{type(error).__name__}: {error}"

    for handle in handles.values():
        handle.observe(redraw, names="value")
    display(ipywidgets.VBox([*handles.values(), picture, caption]))


def _handle(name: str, control: Slider | list[Any] | bool) -> Any:
    import ipywidgets

    look = {
        "description": _label(name),
        "style": {"description_width": "9em"},
        "layout": {"width": "100%", "max_width": "34em"},
    }
    if isinstance(control, bool):
        return ipywidgets.Checkbox(value=control, **look)
    if isinstance(control, list):
        if all(isinstance(option, str) for option in control):
            return ipywidgets.Dropdown(options=control, **look)
        return ipywidgets.SelectionSlider(options=control, **look)
    whole = all(
        isinstance(x, int) for x in (control.low, control.high, control.start, control.step)
    )
    kind = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
    return kind(value=control.start, min=control.low, max=control.high, step=control.step, **look)
