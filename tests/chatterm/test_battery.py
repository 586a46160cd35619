"""The battery, as psutil tells of it."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from chatterm.backends.battery import Power


@pytest.mark.parametrize(
    ("battery", "low"),
    [
        (None, False),
        (SimpleNamespace(percent=80.0, power_plugged=False), False),
        (SimpleNamespace(percent=10.0, power_plugged=True), False),
        (SimpleNamespace(percent=10.0, power_plugged=None), False),
        (SimpleNamespace(percent=10.0, power_plugged=False), True),
    ],
)
def test_a_battery_is_low_where_nothing_charges_it(
    monkeypatch: pytest.MonkeyPatch, battery: Any, low: bool
) -> None:
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(sensors_battery=lambda: battery))
    assert Power().is_low(100.0) is low


def test_it_is_looked_at_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    battery = SimpleNamespace(percent=10.0, power_plugged=False)
    monkeypatch.setitem(sys.modules, "psutil", SimpleNamespace(sensors_battery=lambda: battery))
    power = Power()
    assert power.is_low(100.0)
    battery.power_plugged = True
    assert power.is_low(110.0)
    assert not power.is_low(131.0)


def test_without_psutil_there_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psutil", None)
    assert not Power().is_low(100.0)
