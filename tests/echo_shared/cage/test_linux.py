"""If a cage (sandbox) holds only in part, the missing guards are reported. Each test runs in a short-lived process,
because a cage cannot be left.
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

if sys.platform != "linux":
    pytest.skip("Linux's own", allow_module_level=True)

ENTER = """
import json, threading
from echo_shared.cage import landlock, linux, seccomp
from echo_shared.cage.description import Cage
{before}
print(json.dumps(linux.enter(Cage({cage})).as_json()))
"""


def entered(before: str = "", cage: str = "") -> dict[str, Any]:
    script = ENTER.format(before=before, cage=cage)
    said = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120)
    fields: dict[str, Any] = json.loads(said.stdout)
    return fields


def test_threads_started_before_the_cage_are_reported() -> None:
    """Before ABI 8, Landlock does not restrict threads that are already running, so these could escape the cage."""
    found = entered("started = threading.Event(); threading.Thread(target=threading.Event().wait, daemon=True).start()")
    whole = any(int(name.split()[1]) >= 8 for name in found["by"] if name.startswith("Landlock"))
    why = "1 threads were running, and Landlock"
    assert whole or all(found["lacks"][guard].startswith(why) for guard in ("reading", "writing", "processes"))
    assert {"network", "programs"} <= set(found["holds"]), "seccomp restricts all threads"


def test_a_kernel_without_landlock_is_named() -> None:
    found = entered("landlock._CREATE_RULESET = 100_000")
    assert found["by"] == ["seccomp"]
    assert found["lacks"] == dict.fromkeys(("reading", "writing", "processes"), "this kernel has no Landlock")


def test_a_processor_without_a_filter_is_named() -> None:
    found = entered("import platform; platform.machine = lambda: 'riscv64'")
    why = "Echo has no filter of system calls for riscv64"
    assert found["lacks"] == dict.fromkeys(("network", "programs", "processes"), why)
    assert found["holds"] == ["reading", "writing"]


@pytest.mark.parametrize(("version", "lacking"), [(2, {"writing", "network"}), (3, {"network"}), (4, set())])
def test_an_old_landlock_lists_missing_guards(version: int, lacking: set[str]) -> None:
    found = entered(f"landlock.abi = lambda: {version}", "connects=(50_052,)")
    assert set(found["lacks"]) == lacking
