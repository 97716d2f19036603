from __future__ import annotations

import logging
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path

import pytest

from echo_shared.errors import StorageError
from echo_shared.logs.log_file import KEPT
from echo_shared.logs.log_reader import LogReader


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "node.log"


@pytest.fixture
def log(path: Path) -> Iterator[logging.Logger]:
    """Yield a logger like `echo-node`'s that begins a new file after 200 bytes."""
    handler = RotatingFileHandler(path, maxBytes=200, backupCount=KEPT, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    yield logger
    handler.close()


def texts(lines: Iterator[str] | list[str]) -> list[str]:
    """Remove the time stamp (24 characters) of each line."""
    return [line[24:] for line in lines]


def test_the_last_lines_reach_back_across_files(path: Path, log: logging.Logger) -> None:
    for number in range(10):
        log.info("number %d %s", number, "x" * 40)
    assert path.with_name("node.log.1").exists()
    found = LogReader(path).last(5)
    assert [text.split()[1] for text in texts(found)] == ["5", "6", "7", "8", "9"]
    assert LogReader(path).last(0) == []
    assert len(LogReader(path).last(1_000)) < 10, "the oldest lines are deleted"


def test_nothing_is_missed_or_told_twice_when_the_file_is_rotated(path: Path, log: logging.Logger) -> None:
    log.info("first")
    file = LogReader(path)
    told = texts(file.last(10))
    for number in range(30):
        log.info("number %d %s", number, "x" * (number % 7) * 10)
        if number % 2:
            told += texts(file.more())
    assert told == ["first", *(f"number {n} {'x' * (n % 7) * 10}" for n in range(30))]


def test_a_line_is_returned_once_complete(path: Path) -> None:
    file = LogReader(path)
    assert file.last(3) == [] and list(file.more()) == []
    with path.open("w", encoding="utf-8") as writer:
        writer.write("2026-01-02 03:04:05,678 half")
        writer.flush()
        assert list(file.more()) == []
        writer.write(" and whole\n  and more\n")
        writer.flush()
        assert list(file.more()) == ["2026-01-02 03:04:05,678 half and whole", "  and more"]


def test_control_characters_are_not_printed(path: Path) -> None:
    path.write_bytes(b"2026-01-02 03:04:05,678 \x1b[2Jgone \xff\n")
    assert texts(LogReader(path).last(1)) == ["?[2Jgone �"]


def test_older_files_are_read_as_many_as_there_are(path: Path) -> None:
    for number, name in enumerate(("node.log", "node.log.1", "node.log.2", "node.log.3")):
        path.with_name(name).write_text(f"{number}\n")
    assert LogReader(path, kept=3).last(9) == ["3", "2", "1", "0"]
    assert LogReader(path, kept=1).last(9) == ["1", "0"]


def test_a_log_that_cannot_be_read_is_reported(path: Path) -> None:
    path.mkdir()
    with pytest.raises(StorageError, match="log cannot be read"):
        LogReader(path).last(1)
