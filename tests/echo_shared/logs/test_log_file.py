import errno
import logging
from pathlib import Path

import pytest

from echo_shared.logs.log_file import LOG_BYTES, LogFile
from tests.small_disk import mounted, needs_mounts


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, __file__, 1, text, None, None)


@needs_mounts
def test_a_full_disk_costs_only_lines_and_they_are_counted(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with mounted(tmp_path / "disk", 256 * 1024) as disk:
        told: list[OSError] = []
        kept = LogFile(disk.directory / "node.log", refused=told.append)
        kept.emit(record("before"))
        disk.fill()
        for number in range(100):
            kept.emit(record(f"{number} " + 100 * "x"))
        assert 0 < kept.missing <= 100
        missing = kept.missing
        disk.empty()
        kept.emit(record("after"))
        kept.close()
        lines = (disk.directory / "node.log").read_text().splitlines()
    assert lines[0] == "before" and lines[-1] == "after"
    assert lines[-2] == f"{missing} lines are missing here, because the disk could not be written."
    assert len(lines) == 3 + 100 - missing, "no line is there twice or in part"
    assert [error.errno for error in told] == [errno.ENOSPC], "the error is reported once"
    assert capfd.readouterr() == ("", "")


def test_a_long_log_file_is_rotated(tmp_path: Path) -> None:
    kept = LogFile(tmp_path / "node.log")
    for _ in range(3):
        kept.emit(record("x" * (LOG_BYTES - 100)))
    kept.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["node.log", "node.log.1", "node.log.2"]


def test_size_and_number_are_the_owners(tmp_path: Path) -> None:
    kept = LogFile(tmp_path / "hub.log", max_bytes=1_000, kept=4)
    for _ in range(9):
        kept.emit(record("x" * 900))
    kept.close()
    assert len(list(tmp_path.iterdir())) == 5 and all(file.stat().st_size <= 1_000 for file in tmp_path.iterdir())


def test_a_broken_record_does_not_affect_later_records(tmp_path: Path) -> None:
    kept = LogFile(tmp_path / "hub.log")
    kept.handleError = lambda record: None  # type: ignore[method-assign]
    kept.emit(logging.LogRecord("test", logging.INFO, __file__, 1, "%d", ("x",), None))
    kept.emit(record("\ud800 after"))
    kept.close()
    assert (tmp_path / "hub.log").read_text() == "\\ud800 after\n"
