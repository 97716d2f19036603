from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from echo_hub.__main__ import INTERRUPTED

DEADLINE_S = 60.0


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("module", ["typer", "pydantic", "echo_hub.config.sections", "echo_hub.main"])
def test_ctrl_c_while_it_loads_is_quiet(module: str, tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-m", "echo_hub", "nodes", str(tmp_path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stderr is not None
        begun = any(line.rstrip().endswith(f" {module}") for line in process.stderr)
        assert begun, f"{module} is not loaded"
        os.killpg(process.pid, signal.SIGINT)
        said = "".join(line for line in process.stderr if not line.startswith("import time:"))
        status = process.wait(DEADLINE_S)
    assert "Traceback" not in said and "KeyboardInterrupt" not in said, said
    assert status in (INTERRUPTED, -signal.SIGINT, 1), (
        "status 1: it had already reported that this is not a run directory"
    )


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals")
@pytest.mark.parametrize("module", ["echo_hub", "echo_node"])
def test_a_process_started_with_ctrl_c_ignored_keeps_ignoring_it(module: str) -> None:
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); sys.argv = ['x', '--help']\n"
        f"from {module}.__main__ import run\n"
        "try:\n    run()\nexcept SystemExit:\n    sys.exit(signal.getsignal(signal.SIGINT) is not signal.SIG_IGN)"
    )
    subprocess.run([sys.executable, "-c", script], stdout=subprocess.DEVNULL, check=True, timeout=DEADLINE_S)
