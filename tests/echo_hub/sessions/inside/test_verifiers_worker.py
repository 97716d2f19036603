"""Agent programs start by the command `uv run`. The worker replaces `uv` by a program of its own, which needs no
package index if the agent's packages are installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from echo_hub.sessions.inside import verifiers_worker
from echo_hub.sessions.inside.verifiers_worker import missing_packages

HEADER = '# /// script\n# requires-python = ">=3.10"\n# dependencies = [{}]\n# ///\nprint("hello")\n'
STAND_IN = [sys.executable, verifiers_worker.__file__, "uv"]


def test_packages_are_looked_up_by_name_version_and_marker() -> None:
    wanted = '"packaging", "pydantic>=2", "pydantic<1", "no-such-package", "no-such-package; python_version < \'3\'"'
    assert missing_packages(HEADER.format(wanted)) == ["pydantic<1", "no-such-package"]
    assert missing_packages("print('no header')") == []


def test_a_program_that_can_run_here_needs_no_index(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(HEADER.format('"pydantic>=2"'))
    assert _answer("sync", "--script", str(script), "-q", "--no-config").returncode == 0
    found = _answer("python", "find", "--script", str(script), "--no-config")
    assert found.stdout.strip() == sys.executable
    for command in (["sync"], ["python", "find"]):  # verifiers checks that uv has these options.
        assert "--script" in _answer(*command, "--help").stdout


def test_another_program_is_left_to_uv_itself(tmp_path: Path) -> None:
    script = tmp_path / "agent.py"
    script.write_text(HEADER.format('"no-such-package"'))
    refused = _answer("sync", "--script", str(script), path=str(tmp_path))
    assert refused.returncode == 1 and "no-such-package, which" in refused.stderr
    real = tmp_path / "uv"
    real.write_text('#!/bin/sh\necho "real $1"\n')
    real.chmod(0o755)
    assert _answer("sync", "--script", str(script), path=str(tmp_path)).stdout == "real sync\n"


def _answer(*arguments: str, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PATH": path or os.environ["PATH"]}
    return subprocess.run([*STAND_IN, *arguments], capture_output=True, text=True, env=environment, timeout=30)
