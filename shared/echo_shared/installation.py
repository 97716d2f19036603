"""Find out how this copy of Echo was installed, and give the commands to extend or upgrade it.

The commands never request Echo by name from a package index, where anyone could own the name. They use the origin that
pip recorded (PEP 610: https://packaging.python.org/specifications/direct-url/): a checkout, a wheel, a directory of
wheels, a repository or a download. If the origin is unknown or deleted, the commands list the packages of the extra
instead.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit
from urllib.request import url2pathname

NAME: Final = "echo-swarm"

_PINS: Final = "constraints.txt"
_OF_WHEELHOUSE: Final = "wheelhouse"
"""Marker file in an environment. It names the directory of wheels ("wheelhouse") that the environment was installed
from.
"""
_UNPINNED: Final = ("vllm",)
"""Extras that need other package versions than a checkout's constraints file allows."""
_OF_EXTRA: Final = re.compile(
    r"(?P<what>[^;]+);(?P<where>.*?)\s*(?:\band\s+)?extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"]"
)


def how_to_install(extra: str) -> str:
    """Return the shell command that installs `extra` on this platform, or a sentence of advice."""
    arguments = _from_source(extra) or _requirements(extra)
    if not arguments:
        return f"Reinstall Echo with its extra {extra}, from the source of this copy."
    return _pip(arguments)


def how_to_upgrade() -> str:
    """Return the command that installs a newer release, or advice."""
    if (Path(sys.prefix) / _OF_WHEELHOUSE).is_file():
        return f"Run the installer's command again, or use a newer wheelhouse: {_installer()}"
    direct_url = _direct_url()
    place, arguments = _local(direct_url), _from_source("")
    if place is None or not arguments:
        whence = _whence(direct_url)
        return f"Install the newer release from the source of this one{whence and f' ({whence})'}."
    if place.is_dir():
        return f"Update {place}, then run: {_pip(arguments)}"
    return f"Get the newer release of {place.name}, and install it like this one: {_pip(arguments)}"


def _installer() -> str:
    if sys.platform == "win32":
        script = Path(sys.prefix) / "installers" / "windows" / "install.ps1"
        return shell_line(["powershell", "-ExecutionPolicy", "Bypass", "-File", str(script), "-From", "ARCHIVE"])
    system = "macos" if sys.platform == "darwin" else "linux"
    return shell_line([str(Path(sys.prefix) / "installers" / system / "install.sh"), "--from", "ARCHIVE"])


def installed_version() -> str | None:
    """Return the version installed on disk, or None. After an upgrade, it differs from the running version."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return None


def shell_line(arguments: Sequence[str], *, windows: bool = sys.platform == "win32") -> str:
    if not windows:
        return shlex.join(arguments)
    quoted = [one if re.fullmatch(r"[\w.:\\/=+-]+", one) else "'" + one.replace("'", "''") + "'" for one in arguments]
    return ("& " if quoted[0].startswith("'") else "") + " ".join(quoted)


def _pip(arguments: Sequence[str]) -> str:
    return shell_line([sys.executable, "-m", "pip", "install", *arguments])


def _from_source(extra: str) -> list[str]:
    """Return pip's arguments that install `extra` from the place from which pip installed this copy of Echo; [] if this
    place is unknown or gone.
    """
    direct_url = _direct_url()
    place, suffix = _local(direct_url), f"[{extra}]" if extra else ""
    if place is not None and (place / "pyproject.toml").is_file():
        pins = ["-c", str(place / _PINS)] if (place / _PINS).is_file() and extra not in _UNPINNED else []
        editable = ["-e"] if direct_url.get("dir_info", {}).get("editable") else []
        return [*pins, *editable, f"{place}{suffix}"]
    if place is not None and place.is_file():
        beside = any(path != place for path in place.parent.glob("*.whl"))
        return [*(["--find-links", str(place.parent)] if beside else []), f"{place}{suffix}"]
    whence = _whence(direct_url)
    return [f"{NAME}{suffix} @ {whence}"] if place is None and whence else []


def _requirements(extra: str) -> list[str]:
    """Return the requirements of `extra` for pip; [] if they are unknown."""
    try:
        requirements = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        return []
    found = (_OF_EXTRA.fullmatch(text) for text in requirements)
    parts = [(one["what"].strip(), one["where"].strip()) for one in found if one is not None and one["extra"] == extra]
    return [f"{what}; {where}" if where else what for what, where in parts]


def _direct_url() -> Mapping[str, Any]:
    """Return pip's record of the place from which it installed Echo, {} if there is none. For a copy that was never
    installed, return its checkout.
    """
    try:
        noted = metadata.distribution(NAME).read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        checkout = Path(__file__).resolve().parents[2]
        return {"url": checkout.as_uri(), "dir_info": {"editable": True}}
    try:
        found = json.loads(noted or "{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _local(direct_url: Mapping[str, Any]) -> Path | None:
    """Return the path from which pip installed Echo, even if it no longer exists; None if Echo came from another
    machine.
    """
    parts = urlsplit(str(direct_url.get("url", "")))
    if parts.scheme != "file":
        return None
    return Path(url2pathname(f"//{parts.netloc}{parts.path}" if parts.netloc else parts.path))


def _whence(direct_url: Mapping[str, Any]) -> str:
    """Return the place from which pip installed Echo, as an argument of pip; "" if it is unknown."""
    url = str(direct_url.get("url", ""))
    vcs: Mapping[str, str] = direct_url.get("vcs_info", {})
    place = f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url
    below = direct_url.get("subdirectory")
    return f"{place}#subdirectory={below}" if below else place
