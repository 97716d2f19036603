import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from echo_node.host.sensors.power import Battery, battery

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has /sys")
SUPPLY = "class/power_supply"


def test_a_machine_without_a_battery_is_on_none(tmp_path: Path, write: Callable[..., Path]) -> None:
    assert battery(tmp_path) is None
    write(f"{SUPPLY}/AC", type="Mains", online=0)
    write(f"{SUPPLY}/hidpp_battery_0", type="Battery", scope="Device", status="Discharging", capacity=10)
    assert battery(tmp_path) is None, "a mouse's"


def test_a_laptops_power_supply_is_detected(write: Callable[..., Path]) -> None:
    write(f"{SUPPLY}/AC", type="Mains", online=0)
    root = write(f"{SUPPLY}/BAT0", type="Battery", scope="System", status="Discharging", capacity=40)
    assert battery(root) == Battery(in_use=True, share=0.4)
    write(f"{SUPPLY}/BAT1", type="Battery", status="Unknown", capacity=100)
    assert battery(root) == Battery(in_use=True, share=0.7), "one of two batteries is used first"
    write(f"{SUPPLY}/AC", online=1)
    write(f"{SUPPLY}/BAT0", status="Charging")
    assert battery(root) == Battery(in_use=False, share=0.7)


def test_usb_charging_counts_as_plugged_in(
    write: Callable[..., Path],
) -> None:
    write(f"{SUPPLY}/ucsi-source-psy-1", type="USB", online=1)
    root = write(f"{SUPPLY}/BAT0", type="Battery", status="Discharging")
    assert battery(root) == Battery(in_use=False, share=None)
    write(f"{SUPPLY}/ucsi-source-psy-1", online="?")
    assert battery(root) == Battery(in_use=True, share=None)
