"""The roof: its arithmetic, its picture, and that what is measured makes sense."""

import matplotlib
import pytest

matplotlib.use("Agg")

from nanobook import roofline, style


def test_the_lower_of_both_limits_binds():
    machine = roofline.Machine(bytes_per_second=10.0, ops_per_second=80.0)
    assert machine.ridge == 8.0
    assert machine.attainable(2) == 20.0
    assert machine.attainable(8) == machine.attainable(100) == 80.0


@pytest.mark.parametrize("ridge", [0.1, 8.0, 1000.0])
def test_the_picture_holds_the_roof_wherever_the_ridge_lies(ridge):
    machine = roofline.Machine(1.0, ridge)
    _, ax = style.figure()
    roofline.draw(ax, machine, intensities=(0.25, 256))
    x, y = ax.lines[0].get_data()
    assert list(x) == sorted(x)
    assert list(y) == [machine.attainable(value) / ridge for value in x]
    assert ax.get_xlim() == (0.25, 256)
    matplotlib.pyplot.close("all")


def test_measured_limits_are_those_of_a_computer(monkeypatch):
    monkeypatch.setattr(roofline, "READ_BYTES", 2**24)
    monkeypatch.setattr(roofline, "MATRIX_SIZES", (64,))
    machine = roofline.measure(repeats=2)
    assert 1e7 < machine.bytes_per_second < 1e13
    assert 1e7 < machine.ops_per_second < 1e15
