"""The text of macOS's sandbox profile. Whether macOS accepts it can be tested only on a Mac."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from echo_shared.cage import macos
from echo_shared.cage.description import Cage, Held


def text(cage: Cage) -> str:
    return macos.profile(cage, reads=[Path("/Users/me/venv")], gpu_caches=[Path("/private/var/folders/x/C")])


def test_the_profile_has_balanced_parentheses() -> None:
    profile = text(Cage(reads=(Path("/a (b)"),)))
    depth = 0
    for mark in re.sub(r'"(\\.|[^"\\])*"', '""', profile):
        depth += {"(": 1, ")": -1}.get(mark, 0)
        assert depth >= 0
    assert depth == 0
    assert profile.splitlines()[:2] == ["(version 1)", "(allow default)"]


def test_denials_come_before_exceptions() -> None:
    profile = text(Cage(reads=(Path("/Users/me/model"),), writes=(Path("/Users/me/derived"),), connects=(50_052,)))
    order = [
        "(deny file-read-data",
        '(subpath "/Users/me/model")',
        "(deny file-write*)",
        '(allow file-write* (subpath "/Users/me/derived")',
        "(deny network*)",
        '(allow network-outbound (remote tcp "*:50052"))',
    ]
    places = [profile.index(part) for part in order]
    assert places == sorted(places)
    for refused in ("process-exec*", "process-fork", "(deny signal (target others))", "appleevent-send"):
        assert refused in profile


def test_without_ports_the_network_is_closed() -> None:
    profile = text(Cage())
    assert "(deny network*)" in profile and "(allow network" not in profile


def test_a_path_cannot_end_its_own_string() -> None:
    assert '(subpath "/a\\"b\\\\c")' in text(Cage(reads=(Path('/a"b\\c'),)))


@pytest.mark.skipif(sys.platform == "darwin", reason="there it would hold")
def test_a_system_without_the_sandbox_gives_the_reason() -> None:
    assert macos.enter(Cage()) == Held.to_nothing(next(iter(macos.enter(Cage()).lacks.values())))
    assert macos.enter(Cage()).sentence.startswith("none: the system's sandbox refuses: ")
