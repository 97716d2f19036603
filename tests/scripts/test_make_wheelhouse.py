from __future__ import annotations

import hashlib
import importlib.util
import platform
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_wheelhouse.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_wheelhouse", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_requirement_has_the_hash_of_its_wheel(script: ModuleType, tmp_path: Path) -> None:
    names = ("zstandard-0.25.0-cp311-cp311-linux_x86_64.whl", "Idna-3.20-py3-none-any.whl")
    wheels = [tmp_path / name for name in names]
    for wheel in wheels:
        wheel.write_bytes(wheel.name.encode())
    hashes = [hashlib.sha256(wheel.name.encode()).hexdigest() for wheel in wheels]
    assert script.requirements_text(wheels) == (
        f"idna==3.20 --hash=sha256:{hashes[1]}\nzstandard==0.25.0 --hash=sha256:{hashes[0]}\n"
    )


@pytest.mark.parametrize(
    ("tags", "glibc"),
    [
        (("py3-none-any",), ""),
        (("cp311-cp311-manylinux_2_17_x86_64.manylinux2014_x86_64",), "2.17"),
        (("cp311-cp311-manylinux_2_27_x86_64.manylinux_2_28_x86_64", "cp311-abi3-manylinux2014_x86_64"), "2.27"),
        (("cp311-cp311-manylinux2010_x86_64", "py3-none-manylinux_2_9_x86_64"), "2.12"),
        (("py3-none-macosx_14_0_arm64",), ""),
    ],
)
def test_the_oldest_glibc_is_that_of_the_most_demanding_wheel(
    script: ModuleType, tags: tuple[str, ...], glibc: str
) -> None:
    assert script.needed_glibc([f"x-1-{tag}.whl" for tag in tags]) == glibc


@pytest.mark.skipif(not platform.libc_ver()[1], reason="no glibc here")
def test_a_wheel_built_here_needs_this_machines_glibc(script: ModuleType) -> None:
    assert script.needed_glibc(["x-1-py3-none-linux_x86_64.whl"]) == ".".join(platform.libc_ver()[1].split(".")[:2])


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere options differ")
def test_builds_are_for_all_processors_by_default(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert script.cmake_options("native") == ["-DGGML_RPC=ON"]
    options = script.cmake_options("all")
    assert {"-DGGML_RPC=ON", "-DGGML_BACKEND_DL=ON", "-DGGML_CPU_ALL_VARIANTS=ON", "-DGGML_NATIVE=OFF"} <= set(options)
    assert "-DGGML_VULKAN=ON" not in options


def test_vulkan_is_compiled_in_if_its_sdk_is_installed(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / ("glslc.exe" if sys.platform == "win32" else "glslc")
    compiler.write_text("#!/bin/sh\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("VULKAN_SDK", str(tmp_path))
    if sys.platform != "darwin":
        assert "-DGGML_VULKAN=ON" in script.cmake_options("all")


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell script as pkg-config")
@pytest.mark.parametrize(
    ("version", "is_used", "is_old"),
    [("1.3.239", True, True), ("1.3.272", True, False), ("1.4.309", True, False), ("", False, False)],
)
def test_old_vulkan_headers_get_what_they_lack(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str, is_used: bool, is_old: bool
) -> None:
    for name, said in (("glslc", ""), ("pkg-config", version)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho {said}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("VULKAN_SDK", raising=False)
    options = script.vulkan_options()
    assert ("-DGGML_VULKAN=ON" in options) is is_used
    assert any("vulkan_layer_settings.hpp" in option for option in options) is is_old
    assert script.LAYER_SETTINGS.is_file()


def test_the_same_files_make_the_same_archive(script: ModuleType, tmp_path: Path) -> None:
    made = []
    for number in (1, 2):
        directory = tmp_path / str(number) / "wheelhouse"
        (directory / "wheels").mkdir(parents=True)
        for name in ("b" * 150, "a") if number == 1 else ("a", "b" * 150):
            (directory / "wheels" / name).write_text(name)
        archive = tmp_path / str(number) / "echo-swarm-1.0-some-where.tar"
        script.archive(directory, archive)
        made.append(archive.read_bytes())
    assert made[0] == made[1]
    with tarfile.open(archive) as tar:
        assert tar.getnames() == [f"echo-swarm-1.0-some-where/wheels/{name}" for name in ("a", "b" * 150)]


def test_an_archive_replaces_the_earlier_one_of_its_platform(script: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "wheelhouse").mkdir()
    (tmp_path / "wheelhouse" / "x").write_text("x")
    serve = tmp_path / "serve"
    for name in ("1.0-linux-x86_64", "1.0-darwin-arm64", "1.1-linux-x86_64"):
        script.archive(tmp_path / "wheelhouse", serve / f"echo-swarm-{name}.tar")
    left = sorted(path.name for path in serve.iterdir())
    assert left == ["echo-swarm-1.0-darwin-arm64.tar", "echo-swarm-1.1-linux-x86_64.tar"]


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
def test_the_script_to_serve_knows_the_archives_by_their_hashes(script: ModuleType, tmp_path: Path) -> None:
    for name in ("1.0-linux-x86_64", "1.0-darwin-arm64"):
        (tmp_path / f"echo-swarm-{name}.tar").write_text(name)
    served = tmp_path / "install.sh"
    assert script.index(tmp_path) == [served]
    text = served.read_text(encoding="utf-8")
    for name in ("1.0-linux-x86_64", "1.0-darwin-arm64"):
        line = f"{name.removeprefix('1.0-')} {hashlib.sha256(name.encode()).hexdigest()} echo-swarm-{name}.tar"
        assert f"\n{line}\n" in text
    assert "@ARCHIVES@" not in text and "@WHEELHOUSE@" not in text
    assert text.rstrip().splitlines()[-1].startswith('main "$@"')
    checked = subprocess.run(["sh", "-n", served], capture_output=True, text=True, timeout=60, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
    told = subprocess.run(["sh", served], capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 1 and "The hub's address is missing" in told.stderr


def test_a_windows_script_is_made_if_a_windows_archive_exists(script: ModuleType, tmp_path: Path) -> None:
    archives = {name: tmp_path / f"echo-swarm-1.0-{name}.tar" for name in ("linux-x86_64", "win32-amd64")}
    for name, archive in archives.items():
        archive.write_text(name)
    served = tmp_path / "install.ps1"
    assert script.index(tmp_path)[1:] == [served]
    text = served.read_text(encoding="utf-8")
    line = f"win32-amd64 {hashlib.sha256(b'win32-amd64').hexdigest()} {archives['win32-amd64'].name}"
    found = dict(re.findall(r"^\$(\w+) = @'\n(.*?)\n'@$", text, re.MULTILINE | re.DOTALL))
    program = (script.ROOT / "installers" / "wheelhouse.py").read_text(encoding="utf-8")
    assert found == {"Archives": line, "Wheelhouse": program.removesuffix("\n")}, "the parts are inserted unchanged"
    assert text.rstrip().splitlines()[-1].startswith("Install-FromHub #")
    assert text.isascii(), "every encoding reads the text equally"
    archives["win32-amd64"].unlink()
    assert script.index(tmp_path) == [tmp_path / "install.sh"] and not served.exists()


def test_a_hubs_wheelhouse_is_for_its_own_python(script: ModuleType) -> None:
    command = [sys.executable, SCRIPT, "--extra", "hub", "--pythons", "3.1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2 and "3.1" in done.stderr and script.THIS_PYTHON in done.stderr


@pytest.mark.slow
def test_the_own_wheel_holds_the_three_packages_and_leaves_the_checkout_alone(
    script: ModuleType, tmp_path: Path
) -> None:
    before = set(script.ROOT.iterdir())
    wheel = script.own_wheel(tmp_path)
    assert set(script.ROOT.iterdir()) == before
    with zipfile.ZipFile(wheel) as content:
        names = set(content.namelist())
    assert {"echo_node/main.py", "echo_hub/main.py", "echo_shared/errors.py"} <= names
