"""Commands work in locales and with outputs that are not UTF-8, for a user whose home directory has letters outside
ASCII.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from echo_shared.errors import ConfigError
from echo_shared.files.utf8 import utf8_names

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="names are Unicode there")

ENVIRONMENTS: dict[str, dict[str, str]] = {
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "C to ASCII": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"},
    "to ASCII": {"LC_ALL": "C.UTF-8", "PYTHONIOENCODING": "ascii:strict"},
    "POSIX to Latin-1": {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"},
    "no locale": {"PYTHONUTF8": "0"},
}
IN_ANY = pytest.mark.parametrize("name", ENVIRONMENTS)


def run(name: str, home: Path | bytes, *command: str | bytes) -> subprocess.CompletedProcess[bytes]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("LC_", "LANG", "PYTHON", "ECHO_"))}
    kept |= {**ENVIRONMENTS[name], "HOME": os.fsdecode(home), "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run([sys.executable, *command], env=kept, cwd=home, capture_output=True, timeout=120, check=False)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    made = tmp_path / "Zoë 家☃😀"
    made.mkdir()
    return made


def shown(home: Path, done: subprocess.CompletedProcess[bytes]) -> str:
    said = done.stdout + done.stderr
    assert b"Traceback" not in said and b"UnicodeEncodeError" not in said, said
    return said.decode(errors="replace")


@IN_ANY
def test_a_node_below_any_home(name: str, home: Path) -> None:
    changed = run(name, home, "-m", "echo_node", "config", "set", "name", "Zoë☃")
    assert changed.returncode == 0 and "Zo" in shown(home, changed)
    (file,) = home.rglob("config.toml")
    assert "Zoë☃" in file.read_text(encoding="utf-8")
    assert {path.name for path in home.iterdir()} <= {".local", ".config", ".cache"}, "all files are in one home"


def test_a_join_that_fails_gives_the_reason_below_any_home(home: Path) -> None:
    joined = run("C to ASCII", home, "-m", "echo_node", "join", "http://127.0.0.1:1")
    assert joined.returncode == 1 and "127.0.0.1:1" in shown(home, joined)


@pytest.mark.parametrize("name", ["C to ASCII", "to ASCII"])
def test_a_run_below_any_home(name: str, home: Path) -> None:
    made = run(name, home, "-m", "echo_hub", "init", "Läufe/☃")
    assert made.returncode == 0, shown(home, made)
    assert (home / "Läufe" / "☃" / "config.toml").is_file()
    missing = run(name, home, "-m", "echo_hub", "nodes", "kein Läuf☃")
    assert missing.returncode == 1 and "kein L" in shown(home, missing)


SWARM = """
import asyncio, pathlib
from echo_shared.files.utf8 import use_utf8
use_utf8()
from echo_shared.swarm.trial import trial
asyncio.run(trial(pathlib.Path.home()))
"""


@pytest.mark.parametrize("name", ["C", "to ASCII"])
def test_libtorrent_writes_below_any_home(name: str, home: Path) -> None:
    done = run(name, home, "-c", SWARM)
    assert done.returncode == 0, shown(home, done)
    assert sorted(path.name for path in home.iterdir()) == ["from", "to"]


@pytest.mark.skipif(sys.platform != "linux", reason="names may be any bytes")
def test_a_home_that_is_not_utf8_is_no_traceback(tmp_path: Path) -> None:
    home = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe"))
    home.mkdir()
    shown(tmp_path, run("C", home, "-m", "echo_hub", "init", os.fsencode(home / "run")))
    listed = run("C", home, "-m", "echo_hub", "nodes", os.fsencode(home / "run"))
    assert listed.returncode == 1 and "not UTF-8" in shown(tmp_path, listed)


def test_text_that_is_not_utf8_is_reported() -> None:
    with pytest.raises(ConfigError, match="not UTF-8") as caught, utf8_names():
        "a\udcff".encode()
    assert caught.value.got == r"'a\udcff'"
