"""The trial that tells whether libtorrent can do what a transfer needs."""

from pathlib import Path

import libtorrent
import pytest

from echo_shared.swarm.trial import trial


async def test_what_one_client_has_the_other_fetches(tmp_path: Path) -> None:
    await trial(tmp_path)
    assert (tmp_path / "to" / "artefact" / "file").stat().st_size == 65_536


async def test_a_libtorrent_that_lacks_something_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(libtorrent.torrent_info, "layout")
    with pytest.raises(AttributeError, match="layout"):
        await trial(tmp_path)
