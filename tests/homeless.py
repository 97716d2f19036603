"""Run Python as a user without a name or a home directory, like a container that is started with only a user id."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping

import pytest

USER = 54_321
VARIABLES = ("LOGNAME", "USER", "LNAME", "USERNAME", "HOME", "XDG_CONFIG_HOME", "XDG_DATA_HOME", "ECHO_NODE_HOME")
INSIDE = ("unshare", "--user", f"--map-user={USER}")


def run_homeless(*arguments: str, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in a user namespace; skip the test if this system allows none."""
    unnamed = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    if (
        shutil.which(INSIDE[0]) is None
        or subprocess.run([*INSIDE, "true"], check=False, capture_output=True).returncode
    ):
        pytest.skip("no rights for a user namespace")
    return subprocess.run(
        [*INSIDE, sys.executable, *arguments],
        env={**unnamed, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
