"""CUDA's device files under /dev may be missing until a program of the driver, here a script, makes them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from echo_node.host import gpu_nodes

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="scripts with a first line are POSIX's")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Simulate a machine with a loaded driver, whose program writes its arguments into the missing device file."""
    program = tmp_path / "nvidia-modprobe"
    program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path / "node"}\n')
    program.chmod(0o755)
    monkeypatch.setattr(gpu_nodes, "_DRIVER", tmp_path)
    monkeypatch.setattr(gpu_nodes, "_NODE", tmp_path / "node")
    monkeypatch.setattr(gpu_nodes, "_PATH", str(tmp_path))
    return tmp_path


def test_missing_files_are_made_once(machine: Path) -> None:
    gpu_nodes.make_nodes()
    assert (machine / "node").read_text() == "-u -c=0\n"
    (machine / "node").write_text("there")
    gpu_nodes.make_nodes()
    assert (machine / "node").read_text() == "there"


def test_without_a_driver_nothing_is_started(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_nodes, "_DRIVER", machine / "none")
    gpu_nodes.make_nodes()
    assert not (machine / "node").exists()


def test_a_program_that_fails_is_reported(machine: Path, caplog: pytest.LogCaptureFixture) -> None:
    (machine / "nvidia-modprobe").write_text("#!/bin/sh\necho no such module >&2; exit 1\n")
    gpu_nodes.make_nodes()
    assert "cannot create it" in caplog.text and "no such module" in caplog.text
