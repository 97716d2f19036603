"""A node's leases with their tokens so far, and the resulting messages to engine and hub."""

from types import SimpleNamespace
from typing import Any, TypeVar

from echo_node.core.effects import CancelLease, Effect, ForgetLease, SendMessage, SpoolLease, SubmitGroup
from echo_node.core.hub_talk import HubTalk
from echo_node.core.leases import Leases
from echo_node.core.placing import Seats
from echo_shared.wire.messages import MAX_VERSION_SPANS, Lease, LeaseReturned, RolloutParts
from tests.echo_node.core.loop_parts import continued, drawn, ended, interruptible, lease, shown

M = TypeVar("M")


def talking() -> HubTalk:
    talk = HubTalk(())
    talk.welcomed(5.0)
    return talk


def running(*held: Lease, talk: HubTalk | None = None) -> Leases:
    leases = Leases(talk or talking())
    for one in held:
        leases.take(one, set(one.indices), 0.0)
    leases.start(OWN, [sole()])
    return leases


def sole() -> Seats:
    return Seats(device="", width=4, window=float("inf"), rate=1.0)


OWN: Any = SimpleNamespace(version_for=lambda one, _: one.policy_version)
FIRST: Any = SimpleNamespace(version_for=lambda one, _: 1)
"""OWN and FIRST stand for the node's policy versions: with OWN, each lease samples with its own version; with FIRST,
with version 1.
"""


def messages(effects: list[Effect], kind: type[M]) -> list[M]:
    return [
        effect.message for effect in effects if isinstance(effect, SendMessage) and isinstance(effect.message, kind)
    ]


def returned(effects: list[Effect]) -> list[tuple[int, tuple[int, ...], str]]:
    return [(one.lease_id, one.indices, one.reason) for one in messages(effects, LeaseReturned)]


def test_a_lease_is_on_disk_from_the_start_and_gone_with_its_last_rollout() -> None:
    leases = Leases(talking())
    assert leases.take(lease(1), {1, 0}, 0.0) == [SpoolLease(lease_id=1, indices=(0, 1))]
    assert leases.is_held(1) and not leases.is_held(2) and leases.num_rollouts == 2
    assert not leases.any_running
    (submitted,) = leases.start(OWN, [sole()])
    assert isinstance(submitted, SubmitGroup) and submitted.request.indices == (0, 1) and leases.any_running
    for index in (0, 1):
        rollout = leases.finished(ended(1, index, 0, tokens=3).rollouts[0])
        assert rollout is not None and rollout.rollout_id == f"1-{index}"
    assert leases.finished(ended(1, 1, 0, tokens=3).rollouts[0]) is None, "once"
    assert (leases.held, leases.num_finished, leases.num_drawn_tokens) == ((), 2, 6)


def test_an_engine_begins_after_the_sampled_tokens() -> None:
    leases = Leases(talking())
    leases.take(continued(1, 1, 7), {0, 1}, 0.0)
    leases.start(OWN, [sole()])
    assert shown(messages(leases.drawn([drawn(1, 1, 1, 8)]), RolloutParts)) == [(1, 1, 1, [8])]
    assert leases.engine_lost("killed", "nobody") == []
    (submitted,) = leases.start(OWN, [sole()])
    assert isinstance(submitted, SubmitGroup)
    assert [(one.index, one.ids.tolist()) for one in submitted.request.prefixes] == [(1, [7, 8])]
    assert (leases.num_held_tokens, leases.most_tokens) == (2, 16)


def test_running_leases_are_returned_after_the_engines_last_report() -> None:
    leases = running(lease(1))
    leases.take(lease(2), {0, 1}, 0.0)
    effects = leases.give_back_all("enough", by=2.0)
    assert effects[0] == CancelLease(lease_id=1) and returned(effects) == [(2, (0, 1), "enough")]
    assert ForgetLease(lease_id=2) in effects and leases.any_leaving
    assert leases.give_back_all("again", by=3.0) == [], "it was already told"
    assert shown(messages(leases.drawn([drawn(1, 0, 0, 5)]), RolloutParts)) == [(1, 0, 0, [5])]
    assert returned(leases.cancelled(1)) == [(1, (0, 1), "enough")]
    assert not leases.any_leaving and leases.cancelled(1) == []


def test_unsent_parts_are_sent_before_the_lease_is_returned() -> None:
    leases = running(lease(1))
    assert leases.drawn([drawn(1, 0, 0, 5)], for_hub=False) == []
    assert shown(messages(leases.drawn([drawn(1, 0, 1, 6)]), RolloutParts)) == [(1, 0, 0, [5, 6])]
    assert leases.drawn([drawn(1, 1, 0, 7)], for_hub=False) == []
    leases.give_back_all("enough", by=2.0)
    effects = leases.leave(2.0)
    said = [effect.message for effect in effects if isinstance(effect, SendMessage)]
    assert [type(one) for one in said] == [RolloutParts, LeaseReturned], "the engine did not answer"
    assert shown(messages(effects, RolloutParts)) == [(1, 1, 0, [7])]


def test_tokens_of_a_replaced_version_are_not_sent() -> None:
    leases = running(lease(1, version=3))
    leases.drawn([drawn(1, 0, 0, 5, version=3)], for_hub=False)
    effects = leases.replaced({3})
    assert messages(effects, RolloutParts) == [] and len(messages(effects, LeaseReturned)) == 1


def test_the_sooner_of_two_deadlines_counts_for_an_engine_that_does_not_answer() -> None:
    leases = running(lease(1, deadline_s=10.0))
    assert leases.give_back_overdue(20.0, by=22.0) == []
    assert leases.give_back_overdue(20.5, by=22.5) == [CancelLease(lease_id=1)]
    leases.give_back_all("enough", by=21.0)
    assert leases.leave(20.9) == []
    assert returned(leases.leave(21.0)) == [(1, (0, 1), "its deadline has passed")]


def test_without_a_hub_nothing_is_waited_for_and_the_return_is_reported_later() -> None:
    talk = talking()
    leases = running(lease(1), talk=talk)
    talk.disconnected()
    assert leases.drawn([drawn(1, 0, 0, 5)]) == []
    assert leases.give_back_all("enough", by=2.0) == [CancelLease(lease_id=1)] and not leases.any_leaving
    assert returned(talk.welcomed(5.0)) == [(1, (0, 1), "enough")]


def test_after_a_reconnect_the_hub_gets_all_parts_again() -> None:
    leases = running(lease(1))
    leases.drawn([drawn(1, 0, 0, 5, 6)])
    leases.connected()
    assert shown(messages(leases.drawn(()), RolloutParts)) == [(1, 0, 0, [5, 6])]


def test_a_revoked_lease_is_not_returned() -> None:
    leases = running(lease(1), lease(2))
    assert leases.revoked(1) == [CancelLease(lease_id=1), ForgetLease(lease_id=1)]
    leases.give_back_all("enough", by=2.0)
    assert leases.revoked(2) == [ForgetLease(lease_id=2)], "the engine was already told"
    assert not leases.any_leaving and leases.revoked(2) == []


def test_an_engines_end_is_attributed_to_its_cause() -> None:
    leases = running(lease(1), lease(2))
    assert leases.engine_lost("out of memory", "nobody") == [] and not leases.any_running
    leases.start(OWN, [sole()])
    for _ in range(2):
        assert leases.engine_lost("crashed", "the work") == []
        # Each of the two leases may have caused the crash, so the first one now runs alone.
        leases.start(OWN, [sole()])
    assert returned(leases.engine_lost("crashed", "the work")) == [
        (1, (0, 1), "the sampling engine died 3 times on it: crashed")
    ]
    assert returned(leases.engine_lost("no model", "the start")) == [
        (2, (0, 1), "the sampling engine does not start: no model")
    ]


def test_leases_of_a_replaced_version_are_returned() -> None:
    leases = running(lease(1, version=1), lease(2, version=2))
    leases.drawn([drawn(1, 0, 0, 5, version=1), drawn(2, 0, 0, 5, version=2)])
    assert leases.replaced(set()) == []
    effects = leases.replaced({2, 3})
    assert effects[0] == CancelLease(lease_id=2)
    assert returned(effects) == [(2, (0, 1), "policy version 2 has been replaced")]


def test_an_interrupted_lease_reports_its_progress_and_restarts() -> None:
    leases = running(interruptible(1), lease(2))
    leases.drawn([drawn(1, 0, 0, 5, 6)])
    assert leases.behind(0) == []
    ((found, counts),) = leases.behind(1)
    assert (found.lease_id, sorted(counts)) == (1, [0, 2])
    assert leases.move([found]) == [CancelLease(lease_id=1)] and leases.behind(1) == []
    assert leases.start(FIRST, [sole()]) == []
    assert leases.cancelled(1) == [], "the lease stays here"
    (submitted,) = leases.start(FIRST, [sole()])
    assert isinstance(submitted, SubmitGroup) and submitted.request.policy_version == 1


def test_leaving_leases_and_rollouts_with_most_versions_are_not_interrupted() -> None:
    leases = running(interruptible(1, count=1))
    for version in range(MAX_VERSION_SPANS):
        assert len(leases.behind(MAX_VERSION_SPANS)) == 1
        leases.drawn([drawn(1, 0, version, 5, version=version)])
    assert leases.behind(MAX_VERSION_SPANS) == []
    leases = running(interruptible(2))
    leases.give_back_all("enough", by=2.0)
    assert leases.behind(1) == []


def test_all_that_runs_is_stopped_once_for_another_engine() -> None:
    leases = running(interruptible(1), lease(2), lease(3, deadline_s=0.25))
    leases.take(lease(4), {0}, 0.0)
    assert leases.give_back_overdue(1.0, by=3.0) == [CancelLease(lease_id=3)]
    assert leases.move([leases.held[0]]) == [CancelLease(lease_id=1)]
    assert leases.move_all() == [CancelLease(lease_id=2)]
    assert leases.move_all() == []


def test_a_group_the_engine_cannot_sample_is_returned_once() -> None:
    leases = running(lease(1))
    leases.give_back_all("enough", by=2.0)
    effects = leases.failed(1, "the prompt is too long")
    assert returned(effects) == [(1, (0, 1), "the prompt is too long")] and CancelLease(lease_id=1) not in effects
    assert leases.failed(1, "again") == [] and leases.leave(2.0) == [] and leases.give_up(1, "again") == []
