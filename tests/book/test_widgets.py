"""`explore`: follows its controls in a notebook, and is a plain picture in the book."""

import ipywidgets
import matplotlib
import pytest
from IPython.display import SVG, Markdown
from nanobook import style, widgets

matplotlib.use("agg")
from matplotlib import pyplot


@pytest.fixture
def shown(monkeypatch):
    """What a cell displays."""
    objects = []
    monkeypatch.setattr("IPython.display.display", objects.append)
    monkeypatch.delenv("NANOBOOK_STATIC", raising=False)
    yield objects
    pyplot.close("all")


def draw(batch, context=8, log=False):
    """Writes its arguments where a test can find them: into the picture's title."""
    fig, ax = style.figure(height=2)
    ax.plot([1, batch], [1, context])
    fig.suptitle(f"batch{batch}-context{context}-{log}", gid=f"b{batch}c{context}{log}")


def picture_of(box):
    (image,) = (child for child in box.children if isinstance(child, ipywidgets.Image))
    return bytes(image.value).decode()


def control(box, name):
    return next(child for child in box.children if getattr(child, "description", "") == name)


def test_the_picture_follows_each_control(shown):
    widgets.explore(draw, batch=[1, 2, 4], context=widgets.slider(8, 64, start=16), log=False)
    (box,) = shown
    assert "b1c16False" in picture_of(box)
    control(box, "batch").value = 4
    assert "b4c16False" in picture_of(box)
    control(box, "context").value = 64
    control(box, "log").value = True
    assert "b4c64True" in picture_of(box)
    assert pyplot.get_fignums() == []


def test_numbers_slide_and_strings_drop_down(shown):
    widgets.explore(
        lambda **_: style.figure() and None, n=(1, 5), x=(0.0, 1.0, 0.1), kind=["a", "b"]
    )
    kinds = [type(child).__name__ for child in shown[0].children]
    assert kinds[:3] == ["IntSlider", "FloatSlider", "Dropdown"]


def test_text_that_is_returned_stands_below(shown):
    def draw(n):
        style.figure()
        return f"n is {n}"

    widgets.explore(draw, n=[1, 2])
    control(shown[0], "n").value = 2
    assert shown[0].children[-1].value == "n is 2"


def test_an_error_after_the_first_drawing_is_shown(shown):
    def draw(n):
        style.figure()
        if n == 2:
            raise RuntimeError("two is too many")

    widgets.explore(draw, n=[1, 2, 3])
    control(shown[0], "n").value = 2
    assert shown[0].children[-1].value == "RuntimeError: two is too many"
    assert pyplot.get_fignums() == []
    control(shown[0], "n").value = 3
    assert shown[0].children[-1].value == ""


def test_the_book_shows_the_first_position(shown, monkeypatch):
    monkeypatch.setenv("NANOBOOK_STATIC", "1")
    widgets.explore(draw, batch=[1, 2], context=widgets.slider(8, 64, start=16))
    picture, caption, hint = shown
    assert isinstance(picture, SVG) and "b1c16False" in picture.data
    assert isinstance(caption, Markdown) and "batch = 1, context = 16" in caption.data
    assert "*batch* and *context*" in hint.data


def test_the_book_shows_the_positions_that_the_author_chose(shown, monkeypatch):
    monkeypatch.setenv("NANOBOOK_STATIC", "1")
    widgets.explore(draw, static=[{}, {"batch": 2}], batch=[1, 2], context=(8, 64))
    pictures = [one.data for one in shown if isinstance(one, SVG)]
    assert ["b1c8" in pictures[0], "b2c8" in pictures[1], len(pictures)] == [True, True, 2]
    with pytest.raises(ValueError, match="not there: bacth"):
        widgets.explore(draw, static=[{"bacth": 2}], batch=[1, 2])


def test_figures_that_were_open_are_left_alone(shown):
    other, _ = style.figure()
    widgets.explore(draw, batch=[1, 2])
    assert pyplot.get_fignums() == [other.number]


@pytest.mark.parametrize("wrong", [3, [], (1,), "abc", None])
def test_what_is_no_control_is_refused(shown, wrong):
    with pytest.raises(ValueError, match="is no control"):
        widgets.explore(draw, batch=wrong)


def test_a_slider_cannot_start_outside():
    with pytest.raises(ValueError, match="cannot start at 9"):
        widgets.slider(1, 8, start=9)


def test_a_drawing_without_a_figure_is_refused(shown):
    with pytest.raises(ValueError, match="nothing left no figure open"):
        widgets.explore(nothing, n=[1])


def nothing(n):
    return None
