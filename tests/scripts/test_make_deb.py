"""The content of the Debian packages. They are not installed here: that would change this system."""

from __future__ import annotations

import configparser
import importlib.util
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from echo_shared.errors import ConfigError

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_deb.py"
EXTRAS = {"node": "cpu", "hub": "hub"}

pytestmark = pytest.mark.skipif(shutil.which("dpkg-deb") is None, reason="no Debian here")


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("make_deb", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # Dataclasses look their module up in this dict.
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


@pytest.fixture
def wheelhouse(tmp_path: Path) -> Path:
    directory = tmp_path / "wheelhouse"
    (directory / "wheels").mkdir(parents=True)
    (directory / "wheels" / "pip-1-py3-none-any.whl").write_text("a wheel")
    manifest = {"release": "1.0", "platform": "linux-x86_64", "glibc": "2.36", "pythons": ["3.9", "3.13", "3.11"]}
    (directory / "manifest.json").write_text(json.dumps({**manifest, "extra": "cpu"}))
    return directory


def say(wheelhouse: Path, **what: str) -> Path:
    """Change these values in the manifest of the wheelhouse; return the wheelhouse."""
    file = wheelhouse / "manifest.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **what}))
    return wheelhouse


def told(*command: str | Path) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def unpacked(script: ModuleType, name: str, wheelhouse: Path, tmp_path: Path) -> Path:
    """Return the directory with the package's content. A stub replaces the package's program."""
    package = script.build(getattr(script, name)(), say(wheelhouse, extra=EXTRAS[name]), tmp_path / "out")
    content = tmp_path / "content"
    told("dpkg-deb", "--raw-extract", package, content)
    program = content / "opt" / f"echo-{name}" / "bin" / f"echo-{name}"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    return content


@pytest.mark.parametrize(("name", "also"), [("node", ""), ("hub", ", systemd")])
def test_a_package_holds_the_wheelhouse_and_declares_its_dependencies(
    script: ModuleType, wheelhouse: Path, tmp_path: Path, name: str, also: str
) -> None:
    content = unpacked(script, name, wheelhouse, tmp_path)
    (package,) = (tmp_path / "out").iterdir()
    assert package.name == f"echo-{name}_1.0_amd64.deb"
    fields = told("dpkg-deb", "--field", package)
    assert f"Depends: python3 (>= 3.9), python3 (<< 3.14), libc6 (>= 2.36), libstdc++6{also}\n" in fields
    carried = content / "usr" / "share" / f"echo-{name}" / "wheelhouse"
    assert {path.name for path in carried.rglob("*")} == {path.name for path in wheelhouse.rglob("*")}
    command = (content / "usr" / "bin" / f"echo-{name}").readlink()
    assert command == Path(f"/opt/echo-{name}/bin/echo-{name}")
    scripts = [content / "DEBIAN" / part for part in ("postinst", "prerm")]
    for one in scripts:
        checked = subprocess.run(["sh", "-n", one], capture_output=True, check=False, timeout=60)
        assert (checked.returncode, checked.stderr) == (0, b"")
        assert "echo-node" not in one.read_text() or name == "node"
    if shutil.which("shellcheck"):
        told("shellcheck", *scripts)


def test_the_nodes_unit_is_a_user_unit(script: ModuleType, wheelhouse: Path, tmp_path: Path) -> None:
    content = unpacked(script, "node", wheelhouse, tmp_path)
    unit = (content / "usr" / "lib" / "systemd" / "user" / "echo-node.service").read_text()
    assert 'ExecStart="/opt/echo-node/bin/echo-node" "run"' in unit
    assert not (content / "usr" / "lib" / "systemd" / "system").exists()


def test_the_hub_runs_as_its_own_user_in_its_state_directory(
    script: ModuleType, wheelhouse: Path, tmp_path: Path
) -> None:
    content = unpacked(script, "hub", wheelhouse, tmp_path)
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(content / "usr/lib/systemd/system/echo-hub.service")
    service = unit["Service"]
    state = f"/var/lib/{service['StateDirectory']}"
    assert service["ExecStart"] == f"/opt/echo-hub/bin/echo-hub serve {state}/run"
    assert unit["Unit"]["ConditionPathExists"] == f"{state}/run/config.toml"
    kind, user, _, _, home = shlex.split((content / "usr/lib/sysusers.d/echo-hub.conf").read_text())
    assert (kind, user, home) == ("u", service["User"], state)
    assert service["StandardOutput"] == "null", "the token is in no log"
    assert service["NoNewPrivileges"] == "yes" and service["ProtectSystem"] == "strict"
    assert f"-o {user} -g {user} {state}" in (content / "DEBIAN" / "postinst").read_text()
    documentation = unit["Unit"]["Documentation"].removeprefix("file://").lstrip("/")
    assert (content / documentation).is_file()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize(("name", "scope"), [("node", "user"), ("hub", "system")])
def test_systemd_finds_nothing_wrong_with_the_unit(
    script: ModuleType, wheelhouse: Path, tmp_path: Path, name: str, scope: str
) -> None:
    content = unpacked(script, name, wheelhouse, tmp_path)
    unit = content / "usr" / "lib" / "systemd" / scope / f"echo-{name}.service"
    # Change only the program's path.
    unit.write_text(unit.read_text().replace("/opt/", f"{content}/opt/"))
    command = ["env", f"XDG_RUNTIME_DIR={tmp_path}", "systemd-analyze", "verify", "--man=no", f"--{scope}", unit]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    about = [line for line in done.stderr.splitlines() if f"echo-{name}" in line]
    assert about == []
    broken = unit.with_name("broken.service")
    broken.write_text(unit.read_text().replace("Restart=on-failure", "Restart=sometimes"))
    done = subprocess.run([*command[:-1], broken], capture_output=True, text=True, timeout=60, check=False)
    assert "sometimes" in done.stderr, "the check finds mistakes"


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="no systemd here")
def test_systemd_makes_the_hub_s_user(script: ModuleType, wheelhouse: Path, tmp_path: Path) -> None:
    content = unpacked(script, "hub", wheelhouse, tmp_path)
    (content / "etc").mkdir()
    told("systemd-sysusers", f"--root={content}", "echo-hub.conf")
    (user,) = (content / "etc" / "passwd").read_text().splitlines()
    name, _, uid, _, _, home, shell = user.split(":")
    assert (name, home) == ("echo-hub", "/var/lib/echo-hub") and 0 < int(uid) < 1_000 and shell.endswith("nologin")


@pytest.mark.parametrize(("name", "what"), [("node", "make deb"), ("hub", "make deb-hub")])
def test_an_unsuitable_wheelhouse_is_refused_with_the_reason(
    script: ModuleType, wheelhouse: Path, tmp_path: Path, name: str, what: str
) -> None:
    package = getattr(script, name)()
    other = {"node": "hub", "hub": "cpu"}[name]
    for said in ({"platform": "darwin-arm64", "extra": EXTRAS[name]}, {"platform": "linux-x86_64", "extra": other}):
        with pytest.raises(ConfigError, match="cannot be built from this wheelhouse") as caught:
            script.build(package, say(wheelhouse, **said), tmp_path / "out")
        assert all(word in str(caught.value) for word in [*said.values(), what])
    with pytest.raises(ConfigError, match="no wheelhouse here"):
        script.build(package, tmp_path, tmp_path / "out")
    assert not (tmp_path / "out").exists()
