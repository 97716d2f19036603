from __future__ import annotations

import pytest

from echo_hub.operation.alert import AboutRun, Alert


@pytest.fixture
def about() -> AboutRun:
    return AboutRun(run_id="r1", name="spring", url="https://hub.example.org")


@pytest.fixture
def alert() -> Alert:
    return Alert(alert_id="a" * 32, kind="disk", state="began", text="The disk has 1.00 GB left.", at=60.0, since=50.0)
