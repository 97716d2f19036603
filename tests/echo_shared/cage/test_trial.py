"""Before an engine starts, a trial attempts everything that the cage (the engine's sandbox) must refuse."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from echo_shared.cage.description import Held
from echo_shared.cage.guards import GUARDS
from echo_shared.cage.trial import tried


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it holds less")
def test_this_systems_guards_have_been_tried(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_bytes(b"private")
    command = [sys.executable, "-m", "echo_shared.cage.trial", str(private)]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert Held.of(json.loads(said.stdout)).holds == tuple(GUARDS)
    assert private.read_bytes() == b"private"


def test_a_guard_that_only_claims_to_hold_is_detected(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.write_bytes(b"private")
    found = tried(private, Held(by=("hearsay",), lacks={"reading": "not at all"}))
    rest = dict.fromkeys([guard for guard in GUARDS if guard != "reading"], "an attempt was not refused")
    assert found == Held(by=("hearsay",), lacks={"reading": "not at all", **rest})
