"""Before libtorrent is used, a trial calls every function that a transfer needs."""

from pathlib import Path

import libtorrent
import pytest

from echo_shared.swarm.trial import trial


async def test_one_client_fetches_the_others_file(tmp_path: Path) -> None:
    await trial(tmp_path)
    assert (tmp_path / "to" / "artefact" / "file").stat().st_size == 65_536


async def test_a_libtorrent_that_lacks_something_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(libtorrent.torrent_info, "layout")
    with pytest.raises(AttributeError, match="layout"):
        await trial(tmp_path)
