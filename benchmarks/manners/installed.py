"""Waiting time of a volunteer: for an installation without compiler and network, then for the first rollout.

The wheels come from the wheelhouse that `make wheelhouse` makes in dist/. The home directory is empty, and PATH has
only Python and the programs of every system. The hub runs on loopback, so network time is excluded.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.harness.progress import Progress
from benchmarks.harness.site import ended, family
from benchmarks.manners.scene import Models, working_hub
from echo_shared.wire.messages import Rollout

ROOT: Final = Path(__file__).resolve().parents[2]
WHEELHOUSE: Final = ROOT / "dist" / "wheelhouse"
INSTALLER: Final = Path("installers", "macos" if sys.platform == "darwin" else "linux", "install.sh")
TOOLS: Final = (
    *("sh", "env", "cat", "cksum", "cp", "date", "dirname", "basename", "find", "grep", "ln", "mkdir", "mktemp", "mv"),
    *("readlink", "rm", "rmdir", "sed", "sleep", "sort", "uname"),
)
ROLLOUT_TOKENS: Final = 64
"""Tokens of the first rollout: few, because the engine's speed should not matter here."""
INSTALL_S: Final = 600.0
FIRST_ROLLOUT_S: Final = 300.0
LOOK_S: Final = 0.01


def lacks() -> str:
    """Return why this machine cannot install a node from the wheelhouse; "" if it can."""
    return "" if (WHEELHOUSE / "manifest.json").is_file() else "a wheelhouse: make wheelhouse"


async def measure(scratch: Path, models: Models, _progress: Progress, *, model: str) -> Mapping[str, Any]:
    """Time the installer, then the time from the join command until the hub has the first rollout."""
    home, tools = scratch / "home", scratch / "tools"
    home.mkdir()
    tools.mkdir()
    for name in TOOLS:
        if (found := shutil.which(name)) is not None:
            (tools / name).symlink_to(found)
    (tools / "python3").symlink_to(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")
    environment = {"HOME": str(home), "PATH": str(tools)}
    began = time.monotonic()
    await asyncio.to_thread(_install, environment)
    install_s = time.monotonic() - began
    base = models(model)
    installed_bytes = _bytes_in(home)
    first = await _first_rollout(scratch, base, environment)
    return {
        "install_s": install_s,
        **first,
        "base_bytes": (base_bytes := _bytes_in(base)),
        "disk_over_base": (_bytes_in(home) - installed_bytes) / base_bytes,
    }


def _bytes_in(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file() and not path.is_symlink())


def _install(environment: Mapping[str, str]) -> None:
    command: list[str | Path] = [WHEELHOUSE / INSTALLER, "--from", WHEELHOUSE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"The installer failed: {done.stdout}{done.stderr}")


async def _first_rollout(scratch: Path, base: Path, environment: Mapping[str, str]) -> Mapping[str, float]:
    """Return the seconds from the join command until the hub has the first rollout, and the node's memory at
    that time.
    """
    async with working_hub(scratch, base, max_tokens=ROLLOUT_TOKENS) as hub:
        began = time.monotonic()
        with _joined(hub.url, scratch / "node.log", environment) as node:
            async with asyncio.timeout(FIRST_ROLLOUT_S):
                while not hub.all(Rollout):  # noqa: ASYNC110 - `hub.until` has too little patience for a slow machine.
                    await asyncio.sleep(LOOK_S)
            took_s = time.monotonic() - began
            memory = sum(process.memory_info().rss for process in family(psutil.Process(node.pid)))
            return {"join_to_first_rollout_s": took_s, "node_rss_mb": memory / 1e6}


@contextmanager
def _joined(url: str, log: Path, environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    command: list[str | Path] = [Path(environment["HOME"], ".local", "bin", "echo-node"), "join", url, "--quiet"]
    with log.open("ab") as output:
        node = subprocess.Popen(
            command,
            env={**environment, "ECHO_NODE_SWARM_HOST": "127.0.0.1", "ECHO_NODE_MANNERS__PRIORITY": "lowest"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            text=True,
            cwd=os.fspath(log.parent),
        )
    with ended(node):
        yield node
