from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest

from echo_hub.net import peer_log
from echo_hub.net.peer_log import BURST, EVERY_S, MOST_CHARACTERS, PeerLog

LOGGER = logging.getLogger("tests.peer_log")


@pytest.fixture(autouse=True)
def log_everything(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER.name)


def test_a_flood_is_a_few_lines_and_a_number(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    monkeypatch.setattr(peer_log, "time", SimpleNamespace(monotonic=lambda: now))
    log = PeerLog(LOGGER)
    for number in range(10_000):
        log.info("refused %s", f"peer {number}")
    log.warning("another kind")
    assert len(caplog.records) == BURST + 1
    now += EVERY_S
    log.info("refused %s", "the last")
    assert caplog.messages[-1] == f"refused the last (and {10_000 - BURST} more like it)"
    now += EVERY_S
    log.info("refused %s", "one more")
    assert caplog.messages[-1] == "refused one more"


def test_a_peers_text_stays_on_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    log = PeerLog(LOGGER)
    log.info("%s said %s, %d", ValueError("\x1b[2J"), "\u202egnp.exe\r\n2026 ERROR all is lost" + "x" * 9_999, 7)
    (line,) = caplog.messages
    assert line.isprintable() and line.startswith("?[2J said ?gnp.exe??2026") and line.endswith(", 7")
    assert len(line) < MOST_CHARACTERS + 50


def test_a_peers_error_is_a_line_and_an_own_one_has_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    log = PeerLog(LOGGER, theirs=(ValueError,))
    log.exception("a request from %s", "x", exc_info=ValueError("no HTTP\n"))
    log.exception("a request from %s", "x", exc_info=KeyError("a bug"))
    theirs, own = caplog.records
    assert (theirs.levelno, theirs.exc_info, theirs.getMessage()) == (logging.INFO, None, "a request from x: no HTTP?")
    assert own.levelno == logging.ERROR and own.exc_info is not None
