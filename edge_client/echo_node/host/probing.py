"""Runs Python code in a child process, and describes a crash, a hang or an exit status in a sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Final

from echo_shared.wire.messages.fields import printable_line

PROBE_S: Final = 120.0
"""Seconds until a probe counts as hung: importing PyTorch from a slow disk takes most of a minute."""
_MOST_SAID: Final = 200


def failure_of(code: str, *, env: Mapping[str, str] | None = None, within_s: float = PROBE_S) -> str | None:
    """Run this code in a child process. Return a sentence about its failure, or None. `env` extends this process's
    environment.
    """
    try:
        ended = subprocess.run(
            [sys.executable, "-c", code],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=within_s,
            check=False,
            env={**os.environ, **(env or {})},
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {within_s:.0f} s"
    except OSError as error:
        return str(error)
    if ended.returncode == 0:
        return None
    last = next((line for line in reversed(ended.stderr.splitlines()) if line.strip()), "")
    status = f"exit status {ended.returncode}" if ended.returncode > 0 else f"killed by signal {-ended.returncode}"
    return f"{status}: {printable_line(last)[:_MOST_SAID]}" if last and ended.returncode > 0 else status
