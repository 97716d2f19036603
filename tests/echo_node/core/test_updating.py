"""When a node updates itself: whatever hubs say, it runs the installer at most once a day."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from echo_node.core.updating import (
    DAY_S,
    SENTENCES,
    ComeBack,
    Install,
    Known,
    Note,
    SourceKind,
    Stay,
    Try,
    Why,
    against_try,
    decide,
    host_of,
    name_of,
)

NOW = 1_000 * DAY_S
SAID = "Hub and node speak different protocol versions. (node 1 (echo-swarm 0.1.0), hub 3)"
LOCAL = Note(origin=SourceKind.WHEELHOUSE, source="/home/ada/echo.tar")
GOOD = Known(mode="auto", refusal=SAID, is_by_installer=True, note=LOCAL, now=NOW)


def at(source: str, **more: Any) -> Note:
    return Note(origin=SourceKind.WHEELHOUSE, source=source, **more)


@pytest.mark.parametrize(
    "source",
    [
        "/home/ada/echo.tar",
        "/home/ada/wheelhouse",
        "https://echo.example.org/linux.tar",
        "http://127.0.0.1:8000/x.tar",
        "http://localhost/x.tar",
        "http://[::1]/x.tar",
    ],
)
def test_a_copy_is_updated_from_a_source_of_newer_releases(source: str) -> None:
    known = replace(GOOD, note=at(source), hub_hosts=("hub.example.org", ""))
    assert decide(known) == Install(source=source, name=name_of(SAID))


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"mode": "never"}, Why.NOT_ASKED),
        ({"mode": "tell"}, Why.NOT_ASKED),
        ({"refusal": ""}, Why.NOT_ASKED),
        ({"is_by_installer": False}, Why.NOT_INSTALLED),
        ({"note": None}, Why.NOT_NOTED),
        ({"note": Note(origin=SourceKind.HUB, source="")}, Why.FROM_HUB),
        ({"note": Note(origin=SourceKind.SOURCE, source="/home/ada/echo")}, Why.FROM_SOURCE),
        ({"note": at("https://hub.example.org/install/x.tar"), "hub_hosts": {"hub.example.org"}}, Why.FROM_HUB),
        ({"note": at("https://HUB.example.org.:9/x.tar"), "hub_hosts": {"hub.example.org"}}, Why.FROM_HUB),
        ({"note": at("http://127.0.0.1/x.tar"), "hub_hosts": {"127.0.0.1"}}, Why.FROM_HUB),
        ({"note": at("https:///x.tar")}, Why.GONE),
        ({"note": at("https://[::1/x.tar")}, Why.GONE),
        ({"note": at("https://echo.example.org/x.tar#sha256=00")}, Why.PINNED),
        ({"note": at("/home/ada/echo.tar#sha256=00")}, Why.PINNED),
        ({"note": at("http://echo.example.org/x.tar")}, Why.UNENCRYPTED),
        ({"note": at("ftp://echo.example.org/x.tar")}, Why.UNENCRYPTED),
        ({"note": at("/home/ada/echo.tar", is_there=False)}, Why.GONE),
        ({"note": at("/tmp/echo.tar", is_owners=False)}, Why.NOT_OWNERS),
        ({"tries": None}, Why.NO_BOOK),
        ({"tries": (Try(name=name_of(SAID), at=0.0),)}, Why.TRIED),
        ({"tries": (Try(name=name_of("else"), at=NOW - DAY_S + 1),)}, Why.TODAY),
        ({"tries": (Try(name=name_of("else"), at=NOW + DAY_S),)}, Why.TODAY),
        ({"is_held": True}, Why.HELD),
    ],
)
def test_each_reason_prevents_an_update_alone(changed: dict[str, Any], why: Why) -> None:
    decision = decide(replace(GOOD, **changed))
    assert isinstance(decision, Stay) and decision.why is why
    assert (decision.sentence == "") == (why is Why.NOT_ASKED)
    assert "{" not in decision.sentence


def test_every_reason_has_a_sentence() -> None:
    assert set(SENTENCES) == set(Why)


def test_an_earlier_attempts_result_is_reported() -> None:
    for outcome in ("The disk is full.", ""):
        decision = decide(replace(GOOD, tries=(Try(name=name_of(SAID), at=0.0, outcome=outcome),)))
        assert isinstance(decision, Stay)
        assert decision.sentence.endswith(outcome or "was not seen.")


def test_all_that_is_known_of_a_copy_leads_somewhere_and_the_installer_runs_only_where_all_is_well() -> None:
    names = ("mode", "refusal", "is_by_installer", "is_replaced", "note", "tries", "is_held")
    values = (
        ("never", "tell", "auto"),
        ("", SAID),
        (False, True),
        (False, True),
        (
            None,
            LOCAL,
            replace(LOCAL, is_there=False),
            replace(LOCAL, is_owners=False),
            Note(origin=SourceKind.HUB, source=""),
        ),
        (None, (), (Try(name=name_of(SAID), at=0.0),), (Try(name="x", at=0.0),), (Try(name="x", at=NOW),)),
        (False, True),
    )
    ended = {Stay: 0, Install: 0, ComeBack: 0}
    for chosen in product(*values):
        known = Known(**dict(zip(names, chosen, strict=True)), now=NOW)
        decision = decide(known)
        ended[type(decision)] += 1
        is_asked = known.mode == "auto" and known.refusal == SAID
        if isinstance(decision, Install):
            assert is_asked and known.is_by_installer and known.note is LOCAL and not known.is_held
            assert not known.is_replaced and known.tries in ((), (Try(name="x", at=0.0),))
        elif isinstance(decision, ComeBack):
            assert is_asked and known.is_replaced
        else:
            assert (decision.why is Why.NOT_ASKED) == (not is_asked)
    assert ended == {Stay: 1_200 - 102, Install: 2, ComeBack: 100}


@pytest.mark.parametrize(
    "names", [lambda hour: "always the same", lambda hour: f"release {hour}", lambda hour: f"{hour % 40}"]
)
def test_a_hub_that_always_says_too_old_causes_one_attempt_a_day(names: Any) -> None:
    tries: list[Try] = []
    hours = 24 * 60
    for hour in range(hours):
        now = NOW + 3_600.0 * hour
        decision = decide(replace(GOOD, refusal=names(hour), tries=tuple(tries), now=now))
        if isinstance(decision, Install):
            tries.append(Try(name=decision.name, at=now))
    assert len({one.name for one in tries}) == len(tries) <= hours / 24
    assert all(after.at - before.at >= DAY_S for before, after in pairwise(tries))
    assert tries, "the first attempt is allowed"


def test_the_first_attempt_and_one_a_day_later_are_allowed() -> None:
    assert against_try((), "a", NOW) is None
    assert against_try((Try(name="b", at=NOW - DAY_S),), "a", NOW) is None


@pytest.mark.parametrize(
    ("url", "host"),
    [("https://A.example:1/x", "a.example"), ("https://a.example.", "a.example"), ("x", ""), ("https://[", "")],
)
def test_hosts_are_compared_in_resolved_form(url: str, host: str) -> None:
    assert host_of(url) == host
