"""The package's content; tests do not install it, for it would go into this very system."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_deb.py"

pytestmark = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no Debian here")


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_deb", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    directory = tmp_path / "wheelhouse"
    (directory / "wheels").mkdir(parents=True)
    (directory / "wheels" / "pip-1-py3-none-any.whl").write_text("a wheel")
    manifest = {"release": "1.0", "platform": "linux-x86_64", "glibc": "2.36", "pythons": ["3.9", "3.13", "3.11"]}
    (directory / "manifest.json").write_text(json.dumps(manifest))
    return directory


def told(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_the_package_carries_the_wheelhouse_and_says_what_it_needs(
    script: ModuleType, wheelhouse: Path, tmp_path: Path
) -> None:
    package = script.build(wheelhouse, tmp_path / "out")
    assert package.name == "echo-node_1.0_amd64.deb"
    fields = told("dpkg-deb", "--field", package)
    assert "Depends: python3 (>= 3.9), python3 (<< 3.14), libc6 (>= 2.36), libstdc++6" in fields
    told("dpkg-deb", "--raw-extract", package, tmp_path / "content")
    content = tmp_path / "content"
    carried = content / "usr" / "share" / "echo-node" / "wheelhouse"
    assert {path.name for path in carried.rglob("*")} == {path.name for path in wheelhouse.rglob("*")}
    assert (content / "usr" / "bin" / "echo-node").readlink() == Path("/opt/echo-node/bin/echo-node")
    unit = (content / "usr" / "lib" / "systemd" / "user" / "echo-node.service").read_text()
    assert 'ExecStart="/opt/echo-node/bin/echo-node" "run"' in unit
    for name in ("postinst", "prerm"):
        checked = subprocess.run(["sh", "-n", content / "DEBIAN" / name], capture_output=True, check=False, timeout=60)
        assert (checked.returncode, checked.stderr) == (0, b"")
    if shutil.which("shellcheck"):
        told("shellcheck", content / "DEBIAN" / "postinst", content / "DEBIAN" / "prerm")


def test_a_wheelhouse_of_another_system_makes_none(script: ModuleType, wheelhouse: Path, tmp_path: Path) -> None:
    manifest = json.loads((wheelhouse / "manifest.json").read_text())
    (wheelhouse / "manifest.json").write_text(json.dumps({**manifest, "platform": "darwin-arm64"}))
    with pytest.raises(KeyError):
        script.build(wheelhouse, tmp_path / "out")
