from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from echo_hub.config.operation_sections import LogConfig
from echo_hub.operation import log_lines
from echo_hub.operation.log_lines import JsonLines, logged_to_file, path_of
from tests.small_disk import mounted, needs_mounts

SECRET = "https://hooks.example.org/T0/the-secret"
own = logging.getLogger("echo_hub.test")


def lines(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path_of(run_dir).read_text(encoding="ascii").splitlines()]


def test_each_log_line_is_a_json_object(tmp_path: Path) -> None:
    with logged_to_file(LogConfig(), tmp_path, secrets=()):
        extra = {"event": "node_joined", "subject": "n1", "data": {"backend": "torch"}}
        own.info("node %s\n\x1b[2J joined", "\u202eä", extra=extra)
        own.debug("not this")
        logging.getLogger("somebody.else").warning("nor is %d lost", 1)
        try:
            raise ValueError("bad")
        except ValueError:
            own.exception("it failed")
    joined, other, failed = lines(tmp_path)
    assert joined.pop("time").endswith("Z")
    assert joined == {"level": "info", "logger": "echo_hub.test", "message": "node \u202eä\n\x1b[2J joined", **extra}
    assert (other["logger"], other["message"]) == ("somebody.else", "nor is 1 lost")
    assert failed["level"] == "error" and failed["exception"].endswith("ValueError: bad")


def test_the_level_is_the_settings(tmp_path: Path) -> None:
    before = logging.getLogger("echo_hub").level
    for level, expected in (("debug", ["a", "b", "c"]), ("warning", ["c"]), ("error", [])):
        with logged_to_file(LogConfig.model_validate({"level": level}), tmp_path / level, secrets=()):
            own.debug("a")
            own.info("b")
            own.warning("c")
        assert [line["message"] for line in lines(tmp_path / level)] == expected
    assert logging.getLogger("echo_hub").level == before and own.isEnabledFor(logging.DEBUG) is False


def test_secrets_are_never_logged(tmp_path: Path) -> None:
    with logged_to_file(LogConfig(), tmp_path, secrets=("", SECRET, "sesame", "open sesame")):
        own.warning("cannot reach %s as %s", SECRET, "hub", extra={"data": {"password": "open sesame", "tries": 3}})
        try:
            raise ConnectionError(f"POST {SECRET}")
        except ConnectionError:
            own.exception("it failed")
    text = path_of(tmp_path).read_text()
    assert "the-secret" not in text and "sesame" not in text
    assert lines(tmp_path)[0]["message"] == "cannot reach [secret] as hub"
    assert lines(tmp_path)[0]["data"] == {"password": "[secret]", "tries": 3}


def test_logs_are_rotated_within_their_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_lines, "MAX_BYTES", 10_000)
    monkeypatch.setattr(log_lines, "KEPT", 2)
    with logged_to_file(LogConfig(), tmp_path, secrets=()):
        for number in range(300):
            own.info("line %d %s", number, "x" * 100)
    files = sorted(path_of(tmp_path).parent.iterdir())
    assert [file.name for file in files] == ["hub.log", "hub.log.1", "hub.log.2"]
    assert all(file.stat().st_size <= 10_000 for file in files)
    assert lines(tmp_path)[-1]["message"].startswith("line 299 ")


@needs_mounts
def test_a_full_disk_is_reported_once_and_lost_lines_later(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    with mounted(tmp_path / "disk", 256 * 1024) as disk:
        with logged_to_file(LogConfig(), disk.directory, secrets=()):
            own.info("before")
            disk.fill()
            for number in range(500):
                own.info("%d %s", number, "x" * 100)
            said = [record for record in caplog.records if "cannot be written; logging resumes" in record.getMessage()]
            assert len(said) == 1 and said[0].levelno == logging.WARNING
            disk.empty()
            own.info("after")
        *_, missing, after = lines(disk.directory)
    assert after["message"] == "after" and missing["message"].endswith("because the disk could not be written.")
    assert missing["level"] == "warning" and int(missing["message"].split()[0]) > 100


def test_values_without_a_json_form_are_logged_as_text() -> None:
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "hello", (), None)
    record.data = {"path": Path("/a"), "list": [1]}
    assert json.loads(JsonLines().format(record))["data"] == {"path": "/a", "list": "[1]"}
