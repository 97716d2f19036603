from pathlib import Path

import pytest

from echo_node.core.shares import HubShare
from echo_node.host.shares import SharesFile
from echo_shared.errors import StorageError


@pytest.fixture
def file(tmp_path: Path) -> SharesFile:
    return SharesFile(tmp_path / "shares.json")


def shares(file: SharesFile) -> dict[str, float]:
    return {hub: one.share for hub, one in file.load().items()}


def test_joining_a_second_hub_keeps_the_firsts_share(file: SharesFile) -> None:
    file.joined("http://b", 2.0, before="http://a")
    assert shares(file) == {"http://a": 1.0, "http://b": 2.0}
    file.joined("http://c", 1.0, before="http://b")
    assert shares(file) == {"http://a": 1.0, "http://b": 2.0, "http://c": 1.0}
    file.joined("http://b", 5.0, before="http://b")
    assert shares(file)["http://b"] == 5.0


def test_joining_one_hub_alone_ends_other_shares(file: SharesFile, tmp_path: Path) -> None:
    file.joined("http://a", 0.0, before=None)
    assert list(tmp_path.iterdir()) == [], "no share to store"
    file.joined("http://b", 2.0, before="http://a")
    file.joined("http://c", 0.0, before="http://b")
    assert set(shares(file).values()) == {0.0}


def test_time_and_shares_outlive_each_other(file: SharesFile) -> None:
    file.joined("http://a", 1.0, before=None)
    file.worked("http://a", 30.0, now=100.0)
    file.joined("http://a", 3.0, before=None)
    assert file.load() == {"http://a": HubShare(share=3.0, worked_s=30.0, at=100.0)}
    file.forget("http://a")
    file.forget("http://a")
    assert file.load() == {}


@pytest.mark.parametrize("text", ["", "[]", '{"hubs": {"a": {"share": -1}}}'])
def test_a_file_that_cannot_be_understood_is_reported(tmp_path: Path, file: SharesFile, text: str) -> None:
    (tmp_path / "shares.json").write_text(text)
    with pytest.raises(StorageError, match="cannot be read") as error:
        file.load()
    assert "echo-node hubs share" in (error.value.do or "")


def test_shares_that_cannot_be_kept_are_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be stored"):
        SharesFile(tmp_path / "file" / "shares.json").save({})
