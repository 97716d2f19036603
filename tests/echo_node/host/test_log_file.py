import logging
from pathlib import Path

import pytest

from echo_node.host.log_file import LOG_BYTES, LogFile
from tests.small_disk import mounted, needs_mounts


def record(text: str) -> logging.LogRecord:
    return logging.LogRecord("test", logging.INFO, __file__, 1, text, None, None)


@needs_mounts
def test_a_full_disk_costs_lines_that_are_counted_and_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with mounted(tmp_path / "disk", 256 * 1024) as disk:
        kept = LogFile(disk.directory / "node.log")
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
    assert lines[-2] == f"{missing} lines are missing here: the disk did not take them."
    assert len(lines) == 3 + 100 - missing, "no line is there twice or in part"
    assert capfd.readouterr() == ("", "")


def test_it_is_set_aside_when_it_is_long(tmp_path: Path) -> None:
    kept = LogFile(tmp_path / "node.log")
    for _ in range(3):
        kept.emit(record("x" * (LOG_BYTES - 100)))
    kept.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["node.log", "node.log.1", "node.log.2"]
