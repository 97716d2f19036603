"""Control groups: files like the kernel's, and a real group with a memory limit, if this machine allows one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from echo_node.host.sensors.cgroup import GROUPS, left_bytes

MIB = 2**20


def tree(root: Path, own: str, **groups: dict[str, object]) -> tuple[Path, Path]:
    """Write the files of each control group below `root`, and the file that names this process's groups; "__" in a
    keyword stands for "/".
    """
    for group, files in groups.items():
        for name, value in files.items():
            file = root / "groups" / group.replace("__", "/") / name.replace("_", ".", 1)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{value}\n")
    (root / "own").write_text(own)
    return root / "groups", root / "own"


def test_the_tightest_of_nested_groups_counts_and_caches_are_free(tmp_path: Path) -> None:
    groups, own = tree(
        tmp_path,
        "0::/user/node\n",
        user__node={"memory_max": 100 * MIB, "memory_current": 90 * MIB, "memory_stat": f"inactive_file {20 * MIB}"},
        user={"memory_max": 60 * MIB, "memory_current": 55 * MIB, "memory_stat": "active_file 0"},
    )
    assert left_bytes(groups, own) == 5 * MIB
    (groups / "user" / "memory.max").write_text("max\n")
    assert left_bytes(groups, own) == 30 * MIB
    (groups / "user" / "node" / "memory.max").write_text("max\n")
    assert left_bytes(groups, own) is None


def test_version_1_and_a_container_with_its_hosts_path(tmp_path: Path) -> None:
    groups, own = tree(
        tmp_path,
        "9:cpu:/x\n4:memory:/docker/abc\n",
        memory={
            "memory_limit_in_bytes": 100 * MIB,
            "memory_usage_in_bytes": 120 * MIB,
            "memory_stat": f"total_inactive_file {10 * MIB}\ntotal_active_file {20 * MIB}",
        },
    )
    assert left_bytes(groups, own) == 10 * MIB
    (groups / "memory" / "memory.limit_in_bytes").write_text(f"{2**63 - 4096}\n")
    assert left_bytes(groups, own) is None


def test_a_machine_without_groups_has_no_limit(tmp_path: Path) -> None:
    assert left_bytes(tmp_path / "none", tmp_path / "none") is None


@pytest.fixture
def group() -> Iterator[tuple[Path, str]]:
    """Yield a new control group that can limit memory, and the name of its limit's file."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux makes groups")
    is_version_1 = (GROUPS / "memory").is_dir()
    place = (GROUPS / "memory" if is_version_1 else GROUPS) / f"echo-test-{os.getpid()}"
    limit = "memory.limit_in_bytes" if is_version_1 else "memory.max"
    try:
        place.mkdir()
        if not (place / limit).exists():
            raise OSError("no memory controller here")
    except OSError as error:
        pytest.skip(f"no group can be made here: {error}")
    try:
        yield place, limit
    finally:
        place.rmdir()


def test_a_real_memory_limit_holds_the_node(group: tuple[Path, str], tmp_path: Path) -> None:
    """In a container, the memory limit of the control group counts, not the machine's memory."""
    place, limit = group
    (place / limit).write_text(str(256 * MIB))
    program = (
        "import os, sys, time; from pathlib import Path; from datetime import datetime\n"
        "Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
        "from echo_node.core.manners import Manners, MannersConfig\n"
        "from echo_node.host.sensors.machine import MachineSensors\n"
        "settings = MannersConfig(min_free_memory_bytes=100 * 2**20, min_free_disk_bytes=0)\n"
        "sensors, manners = MachineSensors(Path(sys.argv[2])), Manners(settings)\n"
        "def holds(now):\n"
        "    reading = sensors.read(settings, engines=(), on_gpu=False)\n"
        "    local = datetime.now().astimezone()\n"
        "    found = manners.holds(reading, pause=None, on_gpu=False, now=now, local=local)\n"
        "    return [hold.reason.value for hold in found if hold.reason.value == 'memory']\n"
        "print(holds(0.0)); taken = b'x' * (170 * 2**20); print(holds(1.0))\n"
        "del taken; print(holds(2.0), holds(60.0), holds(61.0))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(place), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["[]", "['memory']", "['memory'] [] []"], done.stderr
