from __future__ import annotations

import json
import platform
from dataclasses import FrozenInstanceError
from importlib.metadata import version

import pytest

from benchmarks.harness.measurement import PACKAGES, Measurement, conditions


def test_the_conditions_name_the_machine_and_the_software() -> None:
    found = conditions(7)
    assert (found["seed"], found["python"], found["system"]) == (7, platform.python_version(), platform.system())
    assert found["cores"] >= 1
    assert set(found["versions"]) == set(PACKAGES)
    assert found["versions"]["aiohttp"] == version("aiohttp")
    assert json.loads(json.dumps(found)) == found


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.harness.measurement.PACKAGES", ("aiohttp", "no-such-package-of-ours"))
    assert conditions(0)["versions"] == {"aiohttp": version("aiohttp"), "no-such-package-of-ours": None}


def test_a_measurement_is_frozen_and_has_separate_conditions() -> None:
    one, other = Measurement(headline={"x": 1}, rows=[]), Measurement(headline={}, rows=[])
    assert one.conditions == {} and one.conditions is not other.conditions
    with pytest.raises(FrozenInstanceError):
        one.rows = [{}]  # type: ignore[misc]
