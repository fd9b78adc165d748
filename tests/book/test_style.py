"""Figures read in grey, by those who do not tell red from green, on white, and on a phone."""

import io
import itertools
import subprocess
import sys

import matplotlib
import pytest
from nanobook import style

matplotlib.use("agg")
PHONE = 360  # pixels


@pytest.fixture(autouse=True)
def _restored():
    with matplotlib.rc_context():
        yield
    matplotlib.pyplot.close("all")


def _linear(color):
    parts = [int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def _luminance(linear):
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def _lightness(linear):
    return 116 * _luminance(linear) ** (1 / 3) - 16


@pytest.mark.parametrize("color", [*style.COLORS, style.INK, style.MUTED])
def test_every_color_stands_out_from_paper(color):
    wanted = 4.5 if color in (style.INK, style.MUTED) else 3  # text needs more than shapes do
    assert 1.05 / (_luminance(_linear(color)) + 0.05) >= wanted


def test_the_first_four_colors_differ_as_greys():
    greys = [_lightness(_linear(color)) for color in style.COLORS[:4]]
    for one, other in itertools.combinations(greys, 2):
        assert abs(one - other) > 10


@pytest.mark.parametrize("styles", [style.line_styles, style.bar_styles])
def test_six_series_differ_without_their_colors(styles):
    colors = {"color", "facecolor", "edgecolor"}
    series = [*itertools.islice(styles(), 12)]
    first, later = (
        [tuple((k, str(v)) for k, v in one.items() if k not in colors) for one in run]
        for run in (series[:6], series[6:])
    )
    assert len(set(first)) == 6
    assert first == later


def test_the_smallest_type_is_nine_pixels_high_on_a_phone():
    style.use()
    fig, ax = style.figure(height=3)
    for line, name in zip(style.line_styles(), "abc", strict=False):
        ax.plot([1, 2], [1, 2], label=name, **line)
    ax.set(xlabel="x", ylabel="y", title="title")
    ax.legend()
    style.note(fig, "where it comes from")
    fig.canvas.draw()
    texts = [text for text in fig.findobj(matplotlib.text.Text) if text.get_text()]
    assert len(texts) > 10
    width_in_points = fig.get_figwidth() * 72
    assert min(text.get_fontsize() for text in texts) * PHONE / width_in_points >= 9


def test_the_same_figure_is_the_same_bytes():
    def drawn():
        style.use()
        fig, ax = style.figure()
        for bar, x in zip(style.bar_styles(), range(3), strict=False):
            ax.bar(x, x + 1, **bar)
        out = io.BytesIO()
        fig.savefig(out, format="svg", metadata={"Date": None})
        return out.getvalue()

    assert drawn() == drawn()


def test_a_note_gets_room_of_its_own():
    style.use()
    fig, ax = style.figure(height=2.5)
    ax.set_xlabel("tokens")
    style.note(fig, "measured here")
    fig.canvas.draw()
    note = fig._supxlabel.get_window_extent()
    assert note.y1 <= ax.xaxis.label.get_window_extent().y0
    assert note.y0 >= 0


def test_figure_hands_on_what_subplots_knows():
    _, axes = style.figure(2, rows=2, sharex=True)
    assert len(axes) == 2
    assert axes[0].get_shared_x_axes().joined(*axes)


def test_an_unknown_image_format_is_refused():
    with pytest.raises(ValueError, match="'svg' or 'png'"):
        style.use("jpeg")


def test_importing_it_costs_nothing():
    code = "import sys, nanobook.style, nanobook.widgets; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
