from __future__ import annotations

import json
import logging
import math
import re
from pathlib import Path

import pytest

import echo_hub
from echo_hub.core.accounting.effects import TrustDecided
from echo_hub.core.trust.standing import Decision
from echo_hub.operation.events import MOST_CHARACTERS, EventKind, decision_line, event_of
from echo_shared.records.run import RunEvent, Severity

HUB = Path(next(iter(echo_hub.__path__)))


def test_a_line_is_an_event_and_says_which() -> None:
    extra = {"event": "node_joined", "subject": "n1", "data": {"backend": "torch", "width": 8}}
    assert event_of(at=1.5, level=logging.INFO, text="node a joined", extra=extra) == RunEvent(
        at=1.5, kind="node_joined", subject="n1", text="node a joined", data={"backend": "torch", "width": 8}
    )
    assert event_of(at=1.5, level=logging.INFO, text="hello", extra={}) == RunEvent(at=1.5, kind="log", text="hello")


@pytest.mark.parametrize(
    ("level", "severity"),
    [(20, Severity.INFO), (25, Severity.INFO), (30, Severity.WARNING), (40, Severity.ERROR), (50, Severity.ERROR)],
)
def test_a_level_is_a_severity(level: int, severity: Severity) -> None:
    event = event_of(at=0.0, level=level, text="x", extra={})
    assert (event.severity, event.warning) == (severity, level >= 30)


def test_strangers_texts_are_safe_to_store_and_show() -> None:
    """Texts from other machines must be made safe: databases reject NUL and unpaired surrogates, JSON has no infinity,
    and terminals obey control characters.
    """
    extra = {
        "subject": "s" * 100,
        "data": {"name": "\x00\u202e\ud800" + "n" * 300, "speed": math.inf, "what": ["a"], **dict.fromkeys(range(40))},
    }
    event = event_of(at=0.0, level=20, text="\x1b[2J\n" + "x" * 9_999, extra=extra)
    assert event.text.startswith("?[2J?x") and len(event.text) == MOST_CHARACTERS
    assert len(event.subject) == 64 and len(event.data) == 16
    assert event.data["name"].startswith("???n") and len(event.data["name"]) == 200
    assert (event.data["speed"], event.data["what"]) == ("inf", "['a']")
    json.dumps(dict(event.data), allow_nan=False).encode()
    assert event_of(at=0.0, level=20, text="x", extra={"data": "no object"}).data == {}


@pytest.mark.parametrize("decision", Decision)
def test_every_decision_on_a_node_has_a_line(decision: Decision) -> None:
    decided = TrustDecided(node_id="n1", decision=decision, reason="It says %s.", rollout_id="7-0", decided_at=3.0)
    level, text, values, extra = decision_line(decided)
    assert text % values and "It says %s." in text % values and "n1" in text % values
    event = event_of(at=3.0, level=level, text=text % values, extra=extra)
    assert (event.kind, event.subject, event.data) == (f"node_{decision.value}", "n1", {"rollout_id": "7-0"})


def test_the_hubs_log_lines_use_every_event_kind() -> None:
    """Log calls name event kinds as plain strings, so that modules need no import. So no type checker compares the
    names with the enumeration.
    """
    sources = [path.read_text(encoding="utf-8") for path in HUB.rglob("*.py")]
    named = {kind for text in sources for kind in re.findall(r'"event": "(\w+)"', text)}
    named |= {kind for text in sources for kind in re.findall(r'"event": "(\w+)" if .* else "\w+"', text)}
    named |= {kind for text in sources for kind in re.findall(r'"event": "\w+" if .* else "(\w+)"', text)}
    by_decision = {f"node_{decision.value}" for decision in Decision}
    assert named - set(EventKind) == set()
    assert set(EventKind) - named - by_decision == {EventKind.LOG, EventKind.ACTION}
