from pathlib import Path

import pytest

from echo_node.core.notices import Notice
from echo_node.host.last_word import LastWord


def test_the_last_word_is_kept_until_it_is_cleared(tmp_path: Path) -> None:
    word = LastWord(tmp_path / "last_word.json")
    assert word.load() is None
    word.save(Notice("Banned", "The hub says: no."))
    assert word.load() == Notice("Banned", "The hub says: no.")
    word.save(None)
    word.save(None)
    assert word.load() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"title": 1}', "\x00"])
def test_an_unreadable_last_word_does_not_count(tmp_path: Path, text: str) -> None:
    (tmp_path / "last_word.json").write_text(text)
    assert LastWord(tmp_path / "last_word.json").load() is None


def test_a_disk_that_is_full_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    LastWord(tmp_path / "file" / "last_word.json").save(Notice("t", "u"))
    assert "cannot be stored" in caplog.text
