"""An empty home directory for each installation, like a new volunteer's, and wheelhouses (folders of wheels) to install
from.
"""

from __future__ import annotations

import base64
import ensurepip
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS: Final = (
    *("sh", "dash", "bash", "env", "cat", "cksum", "cp", "curl", "date", "dirname", "basename", "find", "grep", "kill"),
    *("ln", "mkdir", "mktemp", "mv", "readlink", "rm", "rmdir", "sed", "sleep", "sort", "uname"),
)
"""Programs that every system has. No compiler is among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    """A user's home directory, and the environment of the user's shell."""

    root: Path
    environment: Mapping[str, str]
    checkout: Path
    """A copy of this checkout: builds would change the original."""

    @property
    def echo_node(self) -> Path:
        return self.root / ".local" / "bin" / "echo-node"

    def run(self, *command: str | Path, timeout_s: float = 120) -> subprocess.CompletedProcess[str]:
        """Run `command` as this user; stdout of the result contains stderr as well."""
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
        """Run the Linux installer; return the path of echo-node. llama.cpp is compiled once and cached."""
        done = self.try_to_install(*options)
        assert done.returncode == 0, done.stdout
        return self.echo_node

    def try_to_install(self, *options: str | Path) -> subprocess.CompletedProcess[str]:
        script = self.checkout / "installers" / "linux" / "install.sh"
        return self.run(script, "--python", interpreter(), *options, timeout_s=1_500)

    def uninstall(self, *options: str) -> str:
        done = self.run(self.checkout / "installers" / "linux" / "uninstall.sh", *options)
        assert done.returncode == 0, done.stdout
        return done.stdout

    def tree(self) -> dict[str, str]:
        """Return all paths in this home, each with a text that identifies its content."""
        return {str(path.relative_to(self.root)): _describe(path) for path in sorted(self.root.rglob("*"))}


def _describe(path: Path) -> str:
    if path.is_symlink():
        return f"-> {path.readlink()}"
    return "directory" if path.is_dir() else hashlib.sha256(path.read_bytes()).hexdigest()


def interpreter() -> Path:
    return Path(sys.base_prefix) / "bin" / f"python{sys.version_info.major}.{sys.version_info.minor}"


@pytest.fixture(scope="session")
def pip_cache() -> str:
    """Return the real user's pip cache, which holds wheels that were compiled before."""
    command = [sys.executable, "-m", "pip", "cache", "dir"]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.strip()


@pytest.fixture(scope="session")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of this checkout, in which installers may build."""
    copy = tmp_path_factory.mktemp("checkout") / "echo"
    for name in ("hub", "edge_client", "shared", "installers"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy2(ROOT / name, copy)
    return copy


@pytest.fixture
def home(tmp_path: Path, checkout: Path, pip_cache: str) -> Home:
    """Return an empty home that shares the real user's pip cache, so that wheels are compiled only once."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "ECHO_", "VIRTUAL_ENV"))}
    kept.pop("PYTHONPATH", None)
    root = tmp_path / "home"
    root.mkdir()
    # pip asks rustc for its version, and the rustc of rustup writes settings into the home directory unless it finds
    # some.
    rustup = {"RUSTUP_HOME": kept.get("RUSTUP_HOME", str(Path.home() / ".rustup"))}
    environment = {**kept, **rustup, "HOME": str(root), "PIP_CACHE_DIR": pip_cache}
    return Home(root=root, environment=environment, checkout=checkout)


@pytest.fixture
def bare_home(home: Home, tmp_path: Path) -> Home:
    """Return a home with only a shell, everyday tools and Python on its PATH: no compiler, no pip cache."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        if (found := shutil.which(name)) is not None:
            (tools / name).symlink_to(found)
    (tools / "python3").symlink_to(interpreter())
    environment = {key: value for key, value in home.environment.items() if not key.startswith("PIP_")}
    return Home(root=home.root, environment={**environment, "PATH": str(tools)}, checkout=home.checkout)


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def opener() -> ModuleType:
    return _loaded(ROOT / "installers" / "wheelhouse.py")


@pytest.fixture(scope="session")
def maker() -> ModuleType:
    return _loaded(ROOT / "scripts" / "make_wheelhouse.py")


MakeSmall = Callable[..., Path]


@pytest.fixture
def small_wheelhouse(tmp_path: Path, opener: ModuleType, maker: ModuleType) -> MakeSmall:
    """Return `make(release, main=CODE)`, which makes a wheelhouse of pip and of a tiny program named echo-node."""

    def make(release: str, main: str = "print('usage: echo-node')", *, extra: Mapping[str, str] | None = None) -> Path:
        directory = tmp_path / f"wheelhouse-{release}"
        wheels = directory / "wheels"
        wheels.mkdir(parents=True)
        bundled = next(Path(ensurepip.__file__).parent.glob("_bundled/pip-*.whl"))
        found = [_write_wheel(wheels, release, main), wheels / bundled.name]
        shutil.copy2(bundled, wheels)
        (directory / f"requirements-{opener.this_python()}.txt").write_text(maker.requirements_text(found))
        shutil.copytree(ROOT / "installers", directory / "installers", ignore=shutil.ignore_patterns("__pycache__"))
        files = [path for path in directory.rglob("*") if path.is_file()]
        manifest = {
            "format": opener.FORMAT,
            "release": release,
            "platform": opener.this_platform(),
            "glibc": "",
            "extra": "cpu",
            "pythons": [opener.this_python()],
            "engine": None,
            "files": {path.relative_to(directory).as_posix(): opener.hash_of(path) for path in files},
            **(extra or {}),
        }
        (directory / opener.MANIFEST).write_text(json.dumps(manifest))
        return directory

    return make


def _write_wheel(into: Path, release: str, main: str) -> Path:
    """Write a small wheel with echo-node. Source:
    https://packaging.python.org/en/latest/specifications/binary-distribution-format/
    """
    path, info = into / f"echo_swarm-{release}-py3-none-any.whl", f"echo_swarm-{release}.dist-info"
    files = {
        "echo_node/__init__.py": "",
        "echo_node/main.py": f"def run():\n    import sys\n    {main}\n",
        "echo_node/__main__.py": "from echo_node.main import run\nrun()\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: echo-swarm\nVersion: {release}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\necho-node = echo_node.main:run\n",
    }
    record = ""
    for name, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{name},sha256={digest},{len(text.encode())}\n"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, text in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n"}.items():
            wheel.writestr(name, text)
    return path
