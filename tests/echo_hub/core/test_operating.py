from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.core.accounting.effects import (
    ActionSettled,
    GroupOpened,
    RolloutsDropped,
    SendLease,
    SettingRecorded,
    TellOperator,
)
from echo_hub.core.accounting.events import OperatorAsked, Tick
from echo_hub.core.operating import PUBLISH_NOW, LiveSetting, RefusedChange, answer, restored, take
from echo_hub.core.settings import CoordinatorSettings
from echo_shared.wire.messages import DropReason

BASE = CoordinatorSettings(
    mode="async",
    steps=100,
    groups_per_step=2,
    group_size=2,
    deadline_s=60.0,
    max_staleness=3,
    publish_every=2,
    learning_rate=1e-3,
)


def asked(what: str, value: str | float = "", number: int = 7) -> OperatorAsked:
    return OperatorAsked(number=number, what=what, value=value)


def changed(settings: CoordinatorSettings, what: str, value: str | float = "", *, step: int = 1) -> CoordinatorSettings:
    published = settings.newest_due_version(step - 1)
    return take(settings, asked(what, value), next_step=step, published_version=published).settings


def test_a_new_interval_begins_with_the_next_step_that_has_no_batch() -> None:
    settings = changed(BASE, LiveSetting.PUBLISH_EVERY, 3, step=6)
    assert [version for version in range(13) if settings.is_due(version)] == [2, 4, 6, 9, 12]
    settings = changed(settings, LiveSetting.PUBLISH_EVERY, 1, step=10)
    assert [version for version in range(13) if settings.is_due(version)] == [2, 4, 6, 9, 10, 11, 12]
    assert settings.interval == 1 and settings.is_due(100)


def test_a_version_is_published_now_and_then_on_at_the_same_interval() -> None:
    settings = changed(BASE, PUBLISH_NOW, step=7)
    assert [version for version in range(12) if settings.is_due(version)] == [2, 4, 6, 7, 9, 11]
    with pytest.raises(RefusedChange, match="Version 8"):
        changed(BASE, PUBLISH_NOW, step=8)
    with pytest.raises(RefusedChange, match="last version"):
        changed(BASE, PUBLISH_NOW, step=100)


def test_a_learning_rate_holds_from_the_next_step_and_not_for_repeated_ones() -> None:
    settings = changed(changed(BASE, LiveSetting.LEARNING_RATE, 1e-4, step=5), LiveSetting.LEARNING_RATE, 2e-4, step=9)
    assert [settings.learning_rate_of(step) for step in (1, 4, 5, 8, 9, 100)] == [1e-3, 1e-3, 1e-4, 1e-4, 2e-4, 2e-4]
    again = changed(settings, LiveSetting.LEARNING_RATE, 3e-4, step=9)
    assert again.learning_rates == ((5, 1e-4), (9, 3e-4))


def test_an_objective_holds_from_the_next_step_and_builds_on_the_last_one() -> None:
    def joined(before: str, wanted: str) -> tuple[str, str, str]:
        if wanted == "bad":
            raise ValueError("It does not fit.")
        return f"{before}+{wanted}", "old", wanted

    settings = replace(BASE, objective="a", change_objective=joined)
    settings = changed(changed(settings, LiveSetting.OBJECTIVE, "b", step=5), LiveSetting.OBJECTIVE, "c", step=9)
    assert [settings.objective_of(step) for step in (1, 4, 5, 8, 9)] == ["a", "a", "a+b", "a+b", "a+b+c"]
    same, (refused,) = answer(settings, asked(LiveSetting.OBJECTIVE, "bad"), next_step=9, published_version=8)
    assert same is settings and isinstance(refused, ActionSettled) and refused.detail == "It does not fit."
    _, (recorded, done) = answer(settings, asked(LiveSetting.OBJECTIVE, "d"), next_step=11, published_version=10)
    assert isinstance(recorded, SettingRecorded) and isinstance(done, ActionSettled)
    assert (done.before, done.after, done.detail) == ("old", "d", "It applies from step 11 on.")
    stored = {"objective": json.loads(json.dumps(recorded.stored))}
    assert restored(replace(settings, objectives=()), stored).objective_of(11) == "a+b+c+d"


@pytest.mark.parametrize(
    ("mode", "what", "value", "why"),
    [
        ("async", LiveSetting.MAX_STALENESS, 0, "published every 2 steps"),
        ("async", LiveSetting.PUBLISH_EVERY, 5, "bound is 3"),
        ("sequential", LiveSetting.MAX_STALENESS, 4, "sequential mode"),
        ("sequential", LiveSetting.PUBLISH_EVERY, 2, "sequential mode"),
        ("colocated", LiveSetting.MAX_STALENESS, 4, "colocated mode"),
        ("async", LiveSetting.LEASING, "open", "open already"),
        ("async", LiveSetting.LEASING, "sideways", "sideways"),
        ("async", "hub.key", 1, "no setting"),
    ],
)
def test_an_impossible_setting_is_refused_with_the_reason(mode: Any, what: str, value: str | float, why: str) -> None:
    settings = replace(BASE, mode=mode, publish_every=1 if mode == "sequential" else 2)
    same, records = answer(settings, asked(what, value), next_step=3, published_version=2)
    (refused,) = records
    assert same is settings and isinstance(refused, ActionSettled) and not refused.done and why in refused.detail


def test_a_bound_that_would_stop_the_run_forever_is_refused() -> None:
    """Version 0 is published and the learner holds version 5. Under a bound of 2, step 6 would need version 3 or
    newer, but the next version is due only after step 6, so the hub must refuse this bound.
    """
    settings = changed(replace(BASE, max_staleness=8, publish_every=9), LiveSetting.PUBLISH_EVERY, 1, step=6)
    with pytest.raises(RefusedChange, match="Step 6 would wait for ever"):
        take(settings, asked(LiveSetting.MAX_STALENESS, 2), next_step=6, published_version=0)
    taken = take(settings, asked(LiveSetting.MAX_STALENESS, 2), next_step=7, published_version=6)
    assert (taken.before, taken.after, taken.settings.staleness_bound) == (8, 2, 2)


CHANGES = st.lists(
    st.tuples(
        st.sampled_from([LiveSetting.MAX_STALENESS, LiveSetting.PUBLISH_EVERY, PUBLISH_NOW]),
        st.integers(1, 8),
        st.integers(0, 3),
    ),
    max_size=12,
)


@given(CHANGES)
def test_after_any_changes_every_step_has_a_fresh_enough_version(
    changes: list[tuple[str, int, int]],
) -> None:
    settings, step = BASE, 1
    for what, value, steps in changes:
        published = settings.newest_due_version(step - 1)
        settings, _ = answer(settings, asked(what, value), next_step=step, published_version=published)
        for _ in range(steps):
            assert settings.newest_due_version(step - 1) >= step - 1 - settings.staleness_bound
            step += 1
    for later in range(step, step + 20):
        assert settings.newest_due_version(later - 1) >= later - 1 - settings.staleness_bound


def test_stored_settings_restore_the_same_settings() -> None:
    base = replace(BASE, change_objective=lambda before, wanted: (wanted, before, wanted))
    settings, books = base, dict[str, Any]()
    for what, value in (
        (LiveSetting.LEASING, "paused"),
        (LiveSetting.MAX_STALENESS, 5),
        (LiveSetting.PUBLISH_EVERY, 4),
        (PUBLISH_NOW, ""),
        (LiveSetting.LEARNING_RATE, 1e-5),
        (LiveSetting.OBJECTIVE, '{"cap": 3}'),
        (LiveSetting.SPEND_CAP, 2.5),
    ):
        settings, records = answer(settings, asked(what, value), next_step=3, published_version=2)
        books |= {record.setting: record.stored for record in records if isinstance(record, SettingRecorded)}
    assert restored(base, json.loads(json.dumps(books))) == settings
    assert set(books) == set(LiveSetting)


def test_in_a_pause_nothing_is_leased_and_leased_rollouts_arrive(bench: Callable[..., Any]) -> None:
    b = bench(max_staleness=1)
    b.node("a", capacity=2)
    lease = b.leases[1]
    b.tell(asked(LiveSetting.LEASING, "paused", 4))
    (told,) = b.of(TellOperator)
    assert told.number == 4 and b.coordinator.status().leasing == "paused"
    b.tell(*(b.arrival(lease, index) for index in lease.indices))
    b.node("b")
    assert not b.of(SendLease) and len(b.leases) == 1
    b.tell(Tick())
    assert (b.coordinator.due_at() or b.now + 1) > b.now, "nothing is due in a loop"
    b.tell(asked(LiveSetting.LEASING, "open", 5))
    assert len(b.leases) > 1


def test_a_drain_finishes_open_groups_and_opens_none(bench: Callable[..., Any]) -> None:
    b = bench(max_staleness=1, group_size=4, prepare=True)
    b.node("a", capacity=2)
    opened = b.coordinator.status().groups_open
    b.tell(asked(LiveSetting.LEASING, "draining"))
    assert b.coordinator.status().leasing == "draining" and opened == 4
    done: set[int] = set()
    while todo := [lease for number, lease in b.leases.items() if number not in done]:
        for lease in todo:
            done.add(lease.lease_id)
            b.deliver(lease)
            assert not b.of(GroupOpened)
    status = b.coordinator.status()
    assert (status.leasing, status.groups_open, status.groups_buffered) == ("drained", 0, opened)
    b.learner()
    b.train(1)
    assert not b.of(GroupOpened)
    b.tell(asked(LiveSetting.LEASING, "open"))
    assert b.of(GroupOpened), "the step made room for new groups"


def test_a_lowered_bound_drops_stale_rollouts_at_once_with_a_reason(bench: Callable[..., Any]) -> None:
    b = bench(max_staleness=2, steps=8)
    b.learner()
    b.node("a")
    for step in (1, 2):
        b.deliver_group(2 * step - 2)
        b.deliver_group(2 * step - 1)
        b.train(step)
    b.deliver_group(4)
    assert b.coordinator.status().groups_buffered == 1
    b.tell(asked(LiveSetting.MAX_STALENESS, 1))
    reasons = {dropped.reason for dropped in b.of(RolloutsDropped)}
    assert reasons == {DropReason.STALE, DropReason.REVOKED} and b.coordinator.status().groups_buffered == 0
    assert any(isinstance(effect, SettingRecorded) for effect in b.effects)
    assert not b.of(GroupOpened), "more groups wait than the new bound admits"


def test_a_raised_bound_admits_more_at_once(bench: Callable[..., Any]) -> None:
    b = bench(max_staleness=0)
    b.node("a")
    assert b.coordinator.status().groups_open == 2
    b.tell(asked(LiveSetting.MAX_STALENESS, 1))
    assert b.coordinator.status().groups_open == 4 and len(b.of(SendLease)) == 2
