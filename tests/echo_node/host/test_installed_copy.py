from __future__ import annotations

import sys
from pathlib import Path

import pytest

from echo_node.core.updating import Note, SourceKind
from echo_node.host.installed_copy import Given, InstalledCopy, is_owners
from tests.echo_node.host.installed import make_copy, note

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="the installer of Windows notes nothing")


def test_an_installed_copy_finds_itself_and_its_replacement(tmp_path: Path) -> None:
    copy = make_copy(tmp_path)
    assert copy.is_by_installer and not copy.is_replaced
    assert (copy.home, copy.environment, copy.newest) == (tmp_path, tmp_path / "versions" / "1", copy.environment)
    assert copy.installer.is_file() and copy.newest_release == ""
    second = tmp_path / "versions" / "2"
    info = second / "lib" / "python3.12" / "site-packages" / "echo_swarm-2.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: echo-swarm\nVersion: 2.0\n")
    (tmp_path / "current").unlink()
    (tmp_path / "current").symlink_to("versions/2")
    assert copy.is_replaced and copy.newest == second and copy.newest_release == "2.0"
    assert copy.environment.name == "1", "this process still uses the first"


@pytest.mark.parametrize("missing", ["current", "installers", "versions"])
def test_an_incomplete_copy_does_not_count(tmp_path: Path, missing: str) -> None:
    copy = make_copy(tmp_path)
    place = {
        "current": tmp_path / "current",
        "installers": copy.environment / "installers",
        "versions": copy.environment,
    }
    place[missing].rename(tmp_path / "elsewhere")
    copy = InstalledCopy(tmp_path / "elsewhere") if missing == "versions" else copy
    assert not copy.is_by_installer and not copy.is_replaced


def test_this_environment_is_no_installers() -> None:
    assert not InstalledCopy().is_by_installer and InstalledCopy().note() is None


def test_the_installers_notes_are_read(tmp_path: Path) -> None:
    copy = make_copy(tmp_path)
    note(copy.environment, source="https://a.example/x.tar", options=["--insecure"], environment={"HOME": "/home/ada"})
    assert copy.given() == Given(
        origin=SourceKind.WHEELHOUSE,
        source="https://a.example/x.tar",
        options=("--insecure",),
        environment={"HOME": "/home/ada"},
    )
    assert copy.note() == Note(origin=SourceKind.WHEELHOUSE, source="https://a.example/x.tar")
    note(copy.environment, origin="hub")
    assert copy.note() == Note(origin=SourceKind.HUB, source="")


@pytest.mark.parametrize("text", ["", "[]", "{}", "\x00", '{"origin": "elsewhere"}', '{"origin": "hub", "source": ""}'])
def test_an_unreadable_note_does_not_count(tmp_path: Path, text: str) -> None:
    copy = make_copy(tmp_path)
    (copy.environment / "source.json").write_text(text)
    assert copy.given() is None and copy.note() is None


def test_a_path_is_looked_at_each_time(tmp_path: Path) -> None:
    copy = make_copy(tmp_path, source=tmp_path / "x.tar")
    assert copy.note() == Note(
        origin=SourceKind.WHEELHOUSE, source=str(tmp_path / "x.tar"), is_there=False, is_owners=False
    )
    (tmp_path / "x.tar").write_bytes(b"")
    found = copy.note()
    assert found is not None and found.is_there and found.is_owners
    (tmp_path / "x.tar").chmod(0o666)
    found = copy.note()
    assert found is not None and found.is_there and not found.is_owners


def test_a_directory_that_others_may_write_to_is_not_the_owners(tmp_path: Path) -> None:
    house = tmp_path / "house"
    house.mkdir()
    (house / "manifest.json").write_text("{}")
    assert is_owners(house)
    for mode, ours in ((0o777, False), (0o1777, True), (0o755, True)):
        tmp_path.chmod(mode)
        assert is_owners(house) == ours, oct(mode)
    house.chmod(0o1777)
    assert not is_owners(house), "others may put files into it"
    house.chmod(0o755)
    (house / "manifest.json").chmod(0o606)
    assert not is_owners(house)
    (house / "manifest.json").unlink()
    assert not is_owners(house), "there is none to check"


def test_a_link_counts_as_its_target(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open" / "x.tar").write_bytes(b"")
    (tmp_path / "link.tar").symlink_to(tmp_path / "open" / "x.tar")
    assert is_owners(tmp_path / "link.tar")
    (tmp_path / "open").chmod(0o777)
    assert not is_owners(tmp_path / "link.tar")
