from pathlib import Path

import pytest

from echo_node.core.updating import DAY_S, Try
from echo_node.host.update_book import UpdateBook
from echo_shared.errors import StorageError


def test_a_tried_release_is_not_retried_and_another_waits_a_day(tmp_path: Path) -> None:
    book = UpdateBook(tmp_path)
    assert book.tries() == ()
    assert book.begin("a", 0.0)
    assert UpdateBook(tmp_path).tries() == (Try(name="a", at=0.0),)
    assert not book.begin("a", 9 * DAY_S) and not UpdateBook(tmp_path).begin("b", DAY_S - 1)
    book.end("a", "The disk is full.")
    assert book.begin("b", DAY_S)
    assert book.tries() == (Try(name="a", at=0.0, outcome="The disk is full."), Try(name="b", at=DAY_S))


@pytest.mark.parametrize("text", ["", "[]", "{}", "\x00", '{"tries": [1]}', '{"tries": [{"name": "a", "at": "soon"}]}'])
def test_an_unreadable_record_of_tries_allows_no_update(tmp_path: Path, text: str) -> None:
    (tmp_path / "updates.json").write_text(text)
    book = UpdateBook(tmp_path)
    assert book.tries() is None and not book.begin("a", 0.0)
    assert (tmp_path / "updates.json").read_text() == text


def test_an_attempt_that_cannot_be_recorded_is_refused(tmp_path: Path) -> None:
    (tmp_path / "updates.lock").mkdir()
    with pytest.raises(StorageError, match="recorded"):
        UpdateBook(tmp_path).begin("a", 0.0)
