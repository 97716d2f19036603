"""How this copy of Echo was installed, and the commands that add to it or renew it.

They never ask a package index for Echo by its name, for that may be anybody's there: they name the place that this copy
came from, which pip has noted (PEP 610: https://packaging.python.org/specifications/direct-url/). A checkout, a wheel,
a folder of wheels, a repository or a download are such places. Where it is not known, or gone, what an extra brings is
named instead of Echo.
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
"""Of the distribution."""

_PINS: Final = "constraints.txt"
_OF_WHEELHOUSE: Final = "wheelhouse"
"""The file in an environment by which the installers know which wheelhouse it is of."""
_UNPINNED: Final = ("vllm",)
"""Extras that need other releases than those which a checkout pins."""
_OF_EXTRA: Final = re.compile(
    r"(?P<what>[^;]+);(?P<where>.*?)\s*(?:\band\s+)?extra\s*==\s*['\"](?P<extra>[^'\"]+)['\"]"
)


def how_to_install(extra: str) -> str:
    """The command, in this platform's shell, that adds what `extra` needs; without one that fits, the advice."""
    arguments = _from_source(extra) or _requirements(extra)
    if not arguments:
        return f"Install Echo anew with its extra {extra}, from where this copy came."
    return _pip(arguments)


def how_to_upgrade() -> str:
    """What brings a newer release here."""
    if (Path(sys.prefix) / _OF_WHEELHOUSE).is_file():
        return f"Run the line again that has installed it, or with a newer wheelhouse: {_installer()}"
    direct_url = _direct_url()
    place, arguments = _local(direct_url), _from_source("")
    if place is None or not arguments:
        whence = _whence(direct_url)
        return f"Install the newer release from where this one came{whence and f' ({whence})'}."
    if place.is_dir():
        return f"Bring {place} up to date, then: {_pip(arguments)}"
    return f"Get the newer release of {place.name}, and install it as this one: {_pip(arguments)}"


def _installer() -> str:
    """What the installer has left beside this copy, as a command."""
    if sys.platform == "win32":
        script = Path(sys.prefix) / "installers" / "windows" / "install.ps1"
        return shell_line(["powershell", "-ExecutionPolicy", "Bypass", "-File", str(script), "-From", "ARCHIVE"])
    system = "macos" if sys.platform == "darwin" else "linux"
    return shell_line([str(Path(sys.prefix) / "installers" / system / "install.sh"), "--from", "ARCHIVE"])


def installed_version() -> str | None:
    """The release that lies on the disk now, which may be another than the one that runs; None where none does."""
    try:
        return metadata.version(NAME)
    except metadata.PackageNotFoundError:
        return None


def shell_line(arguments: Sequence[str], *, windows: bool = sys.platform == "win32") -> str:
    """The arguments as one line to be pasted into a POSIX shell, or into PowerShell on Windows."""
    if not windows:
        return shlex.join(arguments)
    quoted = [one if re.fullmatch(r"[\w.:\\/=+-]+", one) else "'" + one.replace("'", "''") + "'" for one in arguments]
    return ("& " if quoted[0].startswith("'") else "") + " ".join(quoted)


def _pip(arguments: Sequence[str]) -> str:
    return shell_line([sys.executable, "-m", "pip", "install", *arguments])


def _from_source(extra: str) -> list[str]:
    """pip's arguments for this copy's own source with `extra`; none where it is not known, or no longer there."""
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
    """What `extra` brings, each for pip; none where nothing is known of it."""
    try:
        requirements = metadata.requires(NAME) or []
    except metadata.PackageNotFoundError:
        return []
    found = (_OF_EXTRA.fullmatch(text) for text in requirements)
    parts = [(one["what"].strip(), one["where"].strip()) for one in found if one is not None and one["extra"] == extra]
    return [f"{what}; {where}" if where else what for what, where in parts]


def _direct_url() -> Mapping[str, Any]:
    """What pip noted of this copy's origin; of a copy that runs without being installed, its checkout; or nothing."""
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
    """The file or directory of this machine that it names, which may be gone."""
    parts = urlsplit(str(direct_url.get("url", "")))
    if parts.scheme != "file":
        return None
    return Path(url2pathname(f"//{parts.netloc}{parts.path}" if parts.netloc else parts.path))


def _whence(direct_url: Mapping[str, Any]) -> str:
    """The origin as pip takes it, or nothing."""
    url = str(direct_url.get("url", ""))
    vcs: Mapping[str, str] = direct_url.get("vcs_info", {})
    place = f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url
    below = direct_url.get("subdirectory")
    return f"{place}#subdirectory={below}" if below else place
