from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.site import RunFailed, ended, hub_process


def test_a_process_ends_with_its_block_in_every_case() -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], text=True)
    with pytest.raises(ZeroDivisionError), ended(process):
        raise ZeroDivisionError
    assert process.returncode is not None


def test_a_hub_that_does_not_start_is_reported_with_its_log(tmp_path: Path) -> None:
    log = tmp_path / "hub.log"
    with pytest.raises(RunFailed) as failed, hub_process(tmp_path / "nothing", log):
        pass
    assert log.read_text() and str(failed.value).endswith(log.read_text().rstrip())
