"""CUDA is started by calls into the driver's library, here a stub. Each test uses a process, because a loaded library
stays loaded.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from echo_node.host.probing import failure_of

START = "from echo_node.backends import cuda_driver; cuda_driver.start()"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the stand-in is Linux's")


@pytest.mark.usefixtures("stub_cuda")
def test_a_working_driver_reports_nothing() -> None:
    assert failure_of(START) is None


@pytest.mark.usefixtures("stub_cuda")
def test_the_drivers_error_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_CUDA_NEEDS", "nothing works")
    said = failure_of(START)
    assert said is not None and said.endswith("cuInit failed with error 100: no CUDA-capable device")


def test_a_machine_without_the_library_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "libcuda.so.1").write_bytes(b"no library")
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    said = failure_of(START)
    assert said is not None and "the driver's library cannot be loaded" in said
