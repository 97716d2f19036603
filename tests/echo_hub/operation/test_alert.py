from __future__ import annotations

import hashlib
import hmac
import json

from echo_hub.operation.alert import HOUR_S, PER_HOUR, AboutRun, AlertGate, alert_of, payload, signature
from echo_hub.operation.problems import Change, ProblemKind, RunProblem

ABOUT = AboutRun(run_id="r1", name="spring", url="https://hub.example.org")
PROBLEM = RunProblem(kind=ProblemKind.DISK, text="The disk has 1.00 GB left.", since=50.0)
ALERT = alert_of(Change(problem=PROBLEM, began=True, at=60.0), "a" * 32)


def gate() -> AlertGate:
    return AlertGate(kinds=("disk", "attack"))


def test_no_alert_is_sent_twice() -> None:
    one = gate()
    assert one.admits("disk", "began", 0.0)
    assert not one.admits("disk", "began", 200.0), "the problem has not ended"
    assert one.admits("disk", "ended", 201.0) and not one.admits("disk", "ended", 202.0)


def test_a_flapping_problem_is_reported_rarely_and_its_end_only_if_reported() -> None:
    one = gate()
    assert one.admits("disk", "began", 0.0) and one.admits("disk", "ended", 10.0)
    assert not one.admits("disk", "began", HOUR_S - 1) and not one.admits("disk", "ended", HOUR_S - 0.5)
    assert one.admits("disk", "began", HOUR_S)


def test_unwanted_kinds_are_not_told() -> None:
    assert not gate().admits("no_nodes", "began", 0.0)


def test_alerts_beyond_the_hourly_limit_are_held_back_and_counted() -> None:
    kinds = [f"kind {number}" for number in range(PER_HOUR)]
    one = AlertGate(kinds=(*kinds, "disk"))
    assert all(one.admits(kind, "began", 1.0) for kind in kinds)
    assert [one.admits("disk", "began", 2.0), one.admits(kinds[0], "ended", 2.0)] == [False, False]
    assert one.held_back == 2
    assert one.admits(kinds[0], "ended", HOUR_S + 1.0), "its beginning was told, so its end is still told"


def test_a_webhook_is_told_all_and_a_chat_shows_the_text() -> None:
    said = json.loads(payload(ALERT, ABOUT))
    assert said["text"].endswith("] The disk has 1.00 GB left.") and said["message"] == PROBLEM.text
    assert (said["version"], said["id"], said["kind"], said["state"]) == (1, "a" * 32, "disk", "began")
    assert (said["at"], said["since"], said["held_back"]) == (60.0, 50.0, 0)
    assert said["run"] == {"id": "r1", "name": ABOUT.name, "url": ABOUT.url}


def test_a_signature_is_of_the_time_and_the_body() -> None:
    body = payload(ALERT, ABOUT)
    mac = hmac.new(b"s" * 16, b"1700." + body, hashlib.sha256).hexdigest()
    assert signature(body, "s" * 16, 1700) == f"t=1700,v1={mac}"
    assert signature(body, "s" * 16, 1701) != signature(body, "s" * 16, 1700)
