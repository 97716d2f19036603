"""The node's Debian package is installed, upgraded and removed in a directory that stands for /."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_deb.py"
WORKS = "print('echo-node {}')"

pytestmark = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no Debian here")


@pytest.fixture
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("make_deb", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up in this dict.
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_a_package_installs_upgrades_falls_back_and_goes(
    script: ModuleType, bare_home: Any, small_wheelhouse: Any, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    place = root / "opt" / "echo-node"
    place.parent.mkdir(parents=True)

    def run(release: str, part: str, *arguments: str, main: str = "") -> Any:
        made = tmp_path / f"content-{release}"
        if main:
            package = script.build(script.node(), small_wheelhouse(release, main), tmp_path / "out")
            subprocess.run(["dpkg-deb", "--raw-extract", package, made], check=True, timeout=60)
            shutil.copytree(made / "usr", root / "usr", dirs_exist_ok=True, symlinks=True)
        elsewhere = made / "DEBIAN" / f"{part}-elsewhere"
        text = (made / "DEBIAN" / part).read_text()
        elsewhere.write_text(text.replace("/opt/", f"{root}/opt/").replace("house=/", f"house={root}/"))
        return bare_home.run("sh", elsewhere, *arguments)

    for release in ("1.0", "2.0"):
        shutil.rmtree(root / "usr", ignore_errors=True)
        done = run(release, "postinst", "configure", main=WORKS.format(release))
        assert done.returncode == 0, done.stdout
        assert bare_home.run(place / "bin" / "echo-node").stdout == f"echo-node {release}\n"
    shutil.rmtree(root / "usr")
    done = run("3.0", "postinst", "configure", main="sys.exit('no such processor')")
    assert done.returncode != 0 and "no such processor" in done.stdout
    assert bare_home.run(place / "bin" / "echo-node").stdout == "echo-node 2.0\n", "the previous version is back"
    assert [path.name for path in place.parent.iterdir()] == ["echo-node"]
    assert run("3.0", "prerm", "upgrade", "4.0").returncode == 0 and place.exists()
    assert run("3.0", "prerm", "remove").returncode == 0 and not place.exists()
