"""A HOME of its own to install into, as a volunteer who has nothing of Echo yet."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A user's home directory, and the environment of a shell in it."""

    root: Path
    environment: Mapping[str, str]
    checkout: Path
    """A copy of this one, so that no build touches the original."""

    @property
    def echo_node(self) -> Path:
        """Where the installer puts the command."""
        return self.root / ".local" / "bin" / "echo-node"

    def run(self, *command: str | Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Runs `command` as this home's user; stderr is in stdout."""
        return subprocess.run(
            command,
            env=self.environment,
            cwd=self.root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def install(self, *options: str | Path) -> Path:
        """Runs the Linux installer; returns the path of echo-node. llama.cpp is compiled once and then cached."""
        script = self.checkout / "installers" / "linux" / "install.sh"
        done = self.run(script, "--python", interpreter(), *options, timeout_s=1_500)
        assert done.returncode == 0, done.stdout
        return self.echo_node

    def uninstall(self, *options: str) -> str:
        """What the Linux uninstaller says."""
        done = self.run(self.checkout / "installers" / "linux" / "uninstall.sh", *options)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def tree(self) -> dict[str, str]:
        """Everything in this home: path → what it is."""
        return {str(path.relative_to(self.root)): _describe(path) for path in sorted(self.root.rglob("*"))}


def _describe(path: Path) -> str:
    if path.is_symlink():
        return f"-> {path.readlink()}"
    return "directory" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()


def interpreter() -> Path:
    """The Python that the tests' own environment was made with."""
    return Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """Empty. pip's cache is the real user's: what was compiled once is not compiled again."""
    cache = subprocess.run(
        [sys.executable, "-m", "pip", "cache", "dir"], capture_output=True, text=True, check=True, timeout=60
    )
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ECHO_", "VIRTUAL_ENV"))}
    root, checkout = tmp_path / "home", tmp_path / "checkout"
    root.mkdir()
    for name in ("hub", "edge_client", "shared", "installers"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, checkout)
    # pip asks rustc for its version, and rustup's rustc then writes settings where it finds none.
    rustup = {"RUSTUP_HOME": kept.get("RUSTUP_HOME", str(Path.home() / ".rustup"))}
    environment = {**kept, **rustup, "HOME": str(root), "PIP_CACHE_DIR": cache.stdout.strip()}
    return Home(root=root, environment=environment, checkout=checkout)
