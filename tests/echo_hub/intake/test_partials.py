"""Parts of rollouts that nodes stream while they sample: the hub keeps a part that continues the tokens it has, and
counts any other as refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_hub.core.accounting.effects import SendLease
from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.accounting.snapshot import UnfinishedRollout
from echo_hub.core.answer_groups import FIRST_ANSWER_ID
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.intake.partial_rollout import ROLLOUT_BYTES, SPAN_BYTES
from echo_hub.intake.partials import FinishedPartial, Partials, PartRefusal, partials_of
from echo_hub.scoring.asked import AskedGroup, AskedGroups, GroupBounds
from echo_hub.scoring.checks import SamplingBounds
from echo_shared.sampling import version_spans
from echo_shared.sampling.version_spans import Spans
from echo_shared.wire.messages import (
    MAX_VERSION_SPANS,
    FinishReason,
    LeasedPrefix,
    ReceiptState,
    Rollout,
    RolloutPart,
    VersionSpan,
)

ASKED = AskedGroups()
BOUNDS = GroupBounds(SamplingBounds(vocabulary_size=50, max_tokens=10, stop_ids=frozenset({1, 2})), ASKED)


def part(
    start: int,
    ids: Sequence[int],
    *,
    lease_id: int = 7,
    index: int = 0,
    version: int = 3,
    logprobs: Sequence[float] | None = None,
) -> RolloutPart:
    values = [-token / 8 for token in ids] if logprobs is None else logprobs
    return RolloutPart(
        lease_id=lease_id,
        index=index,
        start=start,
        policy_version=version,
        ids=np.array(ids, np.int32),
        logprobs=np.array(values, np.float32),
    )


def prefix(index: int, ids: Sequence[int]) -> LeasedPrefix:
    return LeasedPrefix(index=index, ids=np.array(ids, np.int32), logprobs=-np.array(ids, np.float32) / 8)


def shown(partials: Partials, lease_id: int = 7, index: int = 0) -> list[int] | None:
    found = partials.prefix(lease_id, index)
    if found is None:
        return None
    assert (found.index, found.ids.dtype, found.logprobs.dtype) == (index, np.int32, np.float32)
    assert found.logprobs.tolist() == [-token / 8 for token in found.ids]
    return list(found.ids.tolist())


@pytest.fixture
def partials() -> Partials:
    """Return partials in which node a holds lease 7, with indices 0 and 3."""
    partials = Partials(BOUNDS)
    partials.leased("a", 7, (0, 3), policy_version=3)
    return partials


def test_parts_that_follow_make_a_prefix(partials: Partials) -> None:
    assert partials.prefix(7, 0) is None
    partials.take("a", [part(0, [5, 9]), part(0, [4], index=3), part(2, [8])])
    assert (shown(partials), shown(partials, index=3)) == ([5, 9, 8], [4])
    assert partials.refused == {}


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (part(4, [5]), PartRefusal.GAP),
        (part(1, [5, 5]), PartRefusal.DIFFERENT),
        (part(0, [5, 9, 7, 4]), PartRefusal.DIFFERENT),
        (part(3, [5] * 7), PartRefusal.TOO_LONG),
        (part(3, [5] * 100_000), PartRefusal.TOO_LONG),
        (part(100_000, [5]), PartRefusal.TOO_LONG),
        (part(3, [50]), PartRefusal.BAD_TOKEN),
        (part(3, [-1]), PartRefusal.BAD_TOKEN),
        (part(3, [4, 2]), PartRefusal.BAD_TOKEN),
        (part(3, [4], logprobs=[0.5]), PartRefusal.BAD_LOGPROB),
        (part(3, [4], logprobs=[]), PartRefusal.UNEQUAL_LENGTHS),
        (part(3, [], logprobs=[-1.0]), PartRefusal.UNEQUAL_LENGTHS),
        (part(0, [4], index=1), PartRefusal.NOT_LEASED),
        (part(0, [4], lease_id=8), PartRefusal.NOT_LEASED),
    ],
    ids=lambda value: str(value)[:60],
)
def test_parts_that_do_not_follow_are_refused_with_a_reason(
    partials: Partials, bad: RolloutPart, reason: PartRefusal
) -> None:
    partials.take("a", [part(0, [5, 9, 8])])
    partials.take("a", [bad, part(3, [6])])
    assert partials.refused == {reason: 1}
    assert shown(partials) == [5, 9, 8, 6]


def test_the_parts_of_a_request_keep_its_own_limits() -> None:
    """Tokens 1 and 2 end the run's completions; token 9 ends those of the request, which may be longer."""
    asked = AskedGroups()
    sampling = SamplingParameters(temperature=0.5, max_tokens=12, stop_ids=(9,))
    asked.add(FIRST_ANSWER_ID, AskedGroup(prompt_ids=np.array([3], np.int32), seed=1, sampling=sampling))
    partials = Partials(GroupBounds(BOUNDS.of_run, asked))
    partials.leased("a", 7, (0,), group_id=FIRST_ANSWER_ID, policy_version=3)
    partials.take("a", [part(0, [1, 2] * 5), part(10, [9]), part(10, [5, 5]), part(10, [5])])
    assert shown(partials) == [1, 2] * 5 + [5]
    assert partials.refused == {PartRefusal.BAD_TOKEN: 1, PartRefusal.TOO_LONG: 1}
    finished = rollout(7, [1, 2] * 5 + [5, 9], num_given=0, group_id=FIRST_ANSWER_ID)
    assert partials.finish("a", finished).problem == ""
    too_long = rollout(7, [5] * 13, num_given=0, group_id=FIRST_ANSWER_ID)
    assert "of 1 to 12" in partials.finish("a", too_long).problem


def test_another_nodes_lease_is_not_touched(partials: Partials) -> None:
    partials.leased("b", 8, (0,), policy_version=3)
    partials.take("a", [part(0, [5])])
    partials.take("b", [part(1, [6]), part(0, [6])])
    partials.arrived("b", 7, 0)
    partials.given_back("b", 7, (0, 3))
    partials.take("a", [part(1, [7])])
    assert shown(partials) == [5, 7]
    assert partials.refused == {PartRefusal.NOT_LEASED: 2}


def test_a_reconnected_node_sends_all_its_parts_again(partials: Partials) -> None:
    """Reconnected nodes do not know which tokens the hub has, so they send all again. The hub must take only new
    tokens, and keep the first log-probabilities.
    """
    partials.take("a", [part(0, [5, 9, 8])])
    partials.take("a", [part(0, [5, 9], logprobs=[-4.0, -4.0]), part(2, [8, 7, 6])])
    assert shown(partials) == [5, 9, 8, 7, 6]
    assert partials.num_bytes == 2 * ROLLOUT_BYTES + 8 * 5


def test_a_continuing_node_extends_the_given_prefix() -> None:
    partials = Partials(BOUNDS)
    partials.leased("b", 9, (0, 1), [prefix(0, [5, 9])], policy_version=3)
    partials.take("b", [part(2, [8], lease_id=9), part(0, [4], lease_id=9, index=1)])
    assert (shown(partials, 9), shown(partials, 9, 1)) == ([5, 9, 8], [4])
    partials.take("b", [part(0, [5, 6, 7, 7], lease_id=9)])
    assert partials.refused == {PartRefusal.DIFFERENT: 1}, "another node's tokens cannot be rewritten"


def leases(
    lease_id: int, node_id: str, *indices: int, goes_on: tuple[tuple[int, int], ...] = (), may_move_on: bool = False
) -> SendLease:
    return SendLease(
        node_id=node_id,
        lease_id=lease_id,
        group_id=2,
        indices=indices,
        seed=5,
        policy_version=3,
        deadline_s=9.0,
        goes_on=goes_on,
        may_move_on=may_move_on,
    )


def rollout(
    lease_id: int,
    ids: Sequence[int],
    *,
    num_given: int,
    index: int = 0,
    logprob: float | None = None,
    group_id: int = 2,
) -> Rollout:
    values = -np.array(ids, np.float32) / 8 if logprob is None else np.full(len(ids), logprob, np.float32)
    return Rollout(
        rollout_id=f"{lease_id}-{index}",
        lease_id=lease_id,
        group_id=group_id,
        index=index,
        policy_version_start=3,
        policy_version_end=3,
        completion_ids=np.array(ids, np.int32),
        behavior_logprobs=values,
        finish_reason=FinishReason.STOP,
        sampling_s=0.1,
        num_given=num_given,
    )


def spans(finished: FinishedPartial) -> list[tuple[str, int]]:
    assert all(span.policy_version == 3 for span in finished.spans)
    return [(span.node_id, span.num_tokens) for span in finished.spans]


def test_a_lease_continues_an_earlier_leases_tokens(partials: Partials) -> None:
    partials.take("a", [part(0, [5, 9]), part(0, [4], index=3)])
    (carried,) = partials.begin(leases(9, "b", 0, 1, goes_on=((0, 7), (1, 7))))
    assert (carried.index, carried.ids.tolist(), carried.logprobs.tolist()) == (0, [5, 9], [-5 / 8, -9 / 8])
    partials.take("a", [part(2, [8])])
    partials.take("b", [part(2, [6], lease_id=9)])
    assert (shown(partials), shown(partials, 9)) == ([5, 9, 8], [5, 9, 6]), "the first lease may still win"
    assert partials.begin(leases(10, "b", 0, goes_on=((0, 77),))) == ()


def test_a_returned_prefix_is_kept_until_another_node_finishes_it(partials: Partials) -> None:
    """Tokens that node b adds are not trusted yet: if node b returns the lease as well, a third node must still get
    node a's prefix.
    """
    partials.take("a", [part(0, [5, 9]), part(0, [4], index=3)])
    partials.given_back("a", 7, (0,))
    partials.begin(leases(8, "b", 0, 3, goes_on=((0, 7), (3, 7))))
    partials.given_back("b", 8, (0,))
    partials.begin(leases(9, "c", 0, goes_on=((0, 8),)))
    assert (shown(partials), shown(partials, 8), shown(partials, 9)) == ([5, 9], [5, 9], [5, 9])
    partials.finish("c", rollout(9, [5, 9, 2], num_given=2))
    partials.finish("b", rollout(8, [4, 2], num_given=1, index=3))
    assert (shown(partials), shown(partials, 8)) == (None, None)
    assert shown(partials, index=3) == [4], "its node continues it"


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (rollout(7, [5, 9, 2], num_given=0), ""),
        (rollout(7, [5, 8, 2], num_given=0), "other tokens than were streamed"),
        (rollout(7, [2], num_given=0), "other tokens than were streamed"),
        (rollout(7, [5, 9, 2], num_given=0, logprob=-0.1), "other log-probabilities than were streamed"),
    ],
)
def test_a_finished_rollout_must_begin_with_its_streamed_tokens(
    partials: Partials, sent: Rollout, problem: str
) -> None:
    partials.take("a", [part(0, [5, 9])])
    assert partials.finish("a", sent).problem == problem


def test_a_prefix_too_large_for_a_lease_is_left_out(monkeypatch: pytest.MonkeyPatch, partials: Partials) -> None:
    monkeypatch.setattr("echo_hub.intake.partials.MAX_PREFIX_TOKENS", 4)
    partials.leased("a", 7, (0, 1, 2), policy_version=3)
    partials.take("a", [part(0, [5, 9], index=0), part(0, [4, 4, 4], index=1), part(0, [6], index=2)])
    carried = partials.begin(leases(9, "b", 0, 1, 2, goes_on=((0, 7), (1, 7), (2, 7))))
    assert {prefix.index: prefix.ids.tolist() for prefix in carried} == {1: [4, 4, 4], 2: [6]}
    assert partials.finish("b", rollout(9, [5, 2], num_given=0)).problem == ""


def test_a_finished_rollout_names_the_tokens_of_each_node(partials: Partials) -> None:
    partials.take("a", [part(0, [5, 9])])
    partials.begin(leases(8, "b", 0, goes_on=((0, 7),)))
    partials.take("b", [part(2, [8], lease_id=8)])
    partials.begin(leases(9, "c", 0, goes_on=((0, 8),)))
    assert spans(partials.finish("c", rollout(9, [5, 9, 8, 6, 2], num_given=3))) == [("a", 2), ("b", 1), ("c", 2)]
    assert (partials.num_gone_on, partials.tokens_saved) == (1, 3)
    assert spans(partials.finish("b", rollout(8, [5, 9, 8, 2], num_given=2))) == [("a", 2), ("b", 2)]
    assert spans(partials.finish("a", rollout(7, [5, 9, 2], num_given=0))) == [], "all as it was leased"
    assert (partials.num_gone_on, partials.tokens_saved) == (2, 5)
    assert (shown(partials), shown(partials, 8), shown(partials, 9)) == (None, None, None)


def test_spans_merge_a_nodes_own_parts_and_omit_empty_ones(partials: Partials) -> None:
    partials.take("a", [part(0, [5, 9])])
    partials.begin(leases(8, "b", 0, goes_on=((0, 7),)))
    partials.begin(leases(9, "a", 0, goes_on=((0, 8),)))
    assert spans(partials.finish("a", rollout(9, [5, 9, 2], num_given=2))) == [], "all as it was leased"


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (rollout(9, [5, 9, 2], num_given=1), "1 given tokens instead of 2"),
        (rollout(9, [5, 9, 2], num_given=0), "0 given tokens instead of 2"),
        (rollout(9, [5, 8, 2], num_given=2), "other tokens than were given"),
        (rollout(9, [5], num_given=2), "other tokens than were given"),
        (rollout(9, [5, 9, 2], num_given=2, logprob=-0.1), "other log-probabilities than were given"),
        (rollout(9, [4, 2], num_given=1, index=1), "1 given tokens instead of 0"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_given_prefix_must_come_back_unchanged(partials: Partials, sent: Rollout, problem: str) -> None:
    partials.take("a", [part(0, [5, 9])])
    partials.begin(leases(9, "b", 0, 1, goes_on=((0, 7),)))
    finished = partials.finish("b", sent)
    assert (finished.problem, finished.spans) == (problem, ())
    assert partials.num_gone_on == 0


def test_a_lease_sent_again_carries_its_own_tokens(partials: Partials) -> None:
    """Nodes that get their lease again may still have their own tokens, or start from the longer prefix in the lease.
    The hub accepts both results.
    """
    partials.take("a", [part(0, [5, 9])])
    for num_given, drawn in ((2, [("a", 2), ("b", 3)]), (3, [("a", 2), ("b", 3)])):
        partials.begin(leases(9, "b", 0, 1, goes_on=((0, 7),)))
        partials.take("b", [part(2, [8], lease_id=9), part(0, [4], lease_id=9, index=1)])
        again = partials.begin(leases(9, "b", 0, 1, goes_on=((0, 9), (1, 9))))
        assert {prefix.index: prefix.ids.tolist() for prefix in again} == {0: [5, 9, 8], 1: [4]}
        finished = partials.finish("b", rollout(9, [5, 9, 8, 6, 2], num_given=num_given))
        assert (finished.problem, spans(finished)) == ("", drawn)
        own = partials.finish("b", rollout(9, [4, 2], num_given=num_given - 2, index=1))
        assert (own.problem, spans(own)) == ("", [])


def test_a_lease_sent_again_in_part_keeps_its_returned_rest(partials: Partials) -> None:
    partials.take("a", [part(0, [5]), part(0, [6], index=3)])
    partials.given_back("a", 7, (3,))
    partials.begin(leases(7, "a", 0, goes_on=((0, 7),)))
    partials.take("a", [part(1, [6], index=3)])
    assert (shown(partials), shown(partials, index=3), partials.refused.total()) == ([5], [6], 1)


def test_a_lease_from_before_a_restart_blames_no_node() -> None:
    partials = Partials(BOUNDS)
    partials.begin(leases(7, "a", 0, goes_on=((0, 7),)))
    partials.take("a", [part(0, [5, 9])])
    finished = partials.finish("a", rollout(7, [5, 9, 2], num_given=1))
    assert (finished.problem, spans(finished)) == ("", []), "no other node held it before"
    unknown = partials.finish("b", rollout(9, [5, 2], num_given=1))
    assert (unknown.problem, unknown.is_unattributed) == ("", True)
    whole = partials.finish("b", rollout(9, [5, 2], num_given=0))
    assert (spans(whole), whole.is_unattributed) == ([("b", 2)], False)


@pytest.fixture
def mixing() -> Partials:
    """Return partials of a run that moves unfinished rollouts to new versions: node a holds lease 7 (indices 0 and 3)
    of version 3; version 6 is the newest.
    """
    partials = Partials(BOUNDS, published_version=6)
    partials.begin(leases(7, "a", 0, 3, may_move_on=True))
    return partials


def by(*pairs: tuple[int, int]) -> Spans:
    return tuple(VersionSpan(policy_version=version, num_tokens=count) for version, count in pairs)


def mixed(lease_id: int, ids: Sequence[int], versions: Spans, *, num_given: int = 0) -> Rollout:
    ends = {"policy_version_start": versions[0].policy_version, "policy_version_end": versions[-1].policy_version}
    return rollout(lease_id, ids, num_given=num_given).model_copy(update={"versions": versions, **ends})


def who(finished: FinishedPartial) -> list[tuple[str, int, int]]:
    return [(span.node_id, span.policy_version, span.num_tokens) for span in finished.spans]


def test_every_span_of_tokens_names_its_node_and_its_version(mixing: Partials) -> None:
    mixing.take("a", [part(0, [5, 9]), part(2, [8], version=5)])
    (carried,) = mixing.begin(leases(8, "b", 0, goes_on=((0, 7),), may_move_on=True))
    assert carried.versions == by((3, 2), (5, 1))
    mixing.take("b", [part(3, [7], lease_id=8, version=5), part(4, [6], lease_id=8, version=6)])
    assert mixing.refused == {}
    end = mixing.finish("b", mixed(8, [5, 9, 8, 7, 6, 2], by((3, 2), (5, 2), (6, 2)), num_given=3))
    assert end.problem == ""
    assert who(end) == [("a", 3, 2), ("a", 5, 1), ("b", 5, 1), ("b", 6, 2)]
    alone = mixing.finish("a", mixed(7, [5, 9, 8, 2], by((3, 2), (5, 2))))
    assert who(alone) == [("a", 3, 2), ("a", 5, 2)]


def test_a_rollout_begun_with_a_newer_version_has_spans(mixing: Partials) -> None:
    late = rollout(7, [5, 2], num_given=0).model_copy(update={"policy_version_start": 4, "policy_version_end": 4})
    assert who(mixing.finish("a", late)) == [("a", 4, 2)]


@pytest.mark.parametrize("version", [2, 7])
def test_a_part_of_a_forbidden_version_is_refused(mixing: Partials, version: int) -> None:
    mixing.take("a", [part(0, [5], version=version)])
    assert mixing.refused == {PartRefusal.BAD_VERSION: 1} and shown(mixing) is None
    mixing.announced(7)
    mixing.take("a", [part(0, [5], version=7), part(1, [9], version=6)])
    assert mixing.refused == {PartRefusal.BAD_VERSION: 2} and shown(mixing) == [5]


def test_a_version_between_two_that_are_published_draws_nothing(mixing: Partials) -> None:
    mixing.announced(8)
    mixing.take("a", [part(0, [5]), part(1, [9], version=7), part(1, [9], version=8)])
    assert mixing.refused == {PartRefusal.BAD_VERSION: 1} and shown(mixing) == [5, 9]
    lie = mixed(7, [5, 9, 2], by((3, 1), (7, 1), (8, 1)))
    assert mixing.finish("a", lie).problem == "version 7, which is not published"


def test_a_completion_never_exceeds_the_maximum_length(partials: Partials) -> None:
    for node_id, lease_id, length in (("a", 7, 11), ("a", 7, 0), ("b", 7, 100_000), ("b", 99, 11)):
        problem = partials.finish(node_id, rollout(lease_id, [5] * length, num_given=0)).problem
        assert problem == f"{length} tokens, of 1 to 10 that a completion has"
    partials.leased("a", 8, (0,), policy_version=3)
    assert partials.finish("a", rollout(8, [5] * 10, num_given=0)).problem == ""


def test_a_part_that_repeats_tokens_under_another_version_is_refused(mixing: Partials) -> None:
    mixing.take("a", [part(0, [5, 9]), part(0, [5, 9, 8], version=5), part(0, [5, 9]), part(2, [8], version=5)])
    assert mixing.refused == {PartRefusal.DIFFERENT: 1} and shown(mixing) == [5, 9, 8]


def test_an_uninterruptible_lease_uses_only_its_version(partials: Partials) -> None:
    partials.announced(9)
    partials.take("a", [part(0, [5], version=4)])
    assert partials.refused == {PartRefusal.BAD_VERSION: 1}


def test_from_before_a_restart_training_may_have_moved_on_and_no_evaluation() -> None:
    about = EvaluationGroup(policy_version=3, greedy=True, number=0)
    for group_id, taken in ((2, [5]), (about.group_id, None)):
        row = UnfinishedRollout(
            rollout_id="7-0",
            lease_id=7,
            node_id="a",
            group_id=group_id,
            index=0,
            policy_version=3,
            deadline=9.0,
            state=ReceiptState.LEASED,
            reward=None,
        )
        partials = partials_of(BOUNDS, [row], interrupts=True, published_version=4)
        partials.take("a", [part(0, [5], version=4)])
        assert shown(partials) == taken


def test_the_first_tokens_of_each_rollout_are_reported_once(partials: Partials) -> None:
    assert partials.take("a", [part(0, []), part(0, [5, 9]), part(0, [4], index=3)]) == ("7-0", "7-3")
    assert partials.take("a", [part(2, [8]), part(9, [8], index=3), part(0, [4], lease_id=99)]) == ()
    partials.begin(leases(8, "b", 0, goes_on=((0, 7),)))
    assert partials.take("b", [part(3, [4], lease_id=8)]) == (), "it continues the tokens that are there"


def test_a_limited_number_of_versions_is_kept_and_counted_as_memory(mixing: Partials) -> None:
    bounds = GroupBounds(SamplingBounds(vocabulary_size=50, max_tokens=1_000, stop_ids=frozenset()), ASKED)
    partials = Partials(bounds, published_version=900)
    partials.begin(leases(7, "a", 0, may_move_on=True))
    partials.take("a", [part(number, [5], version=3 + number) for number in range(MAX_VERSION_SPANS + 1)])
    assert partials.refused == {PartRefusal.BAD_VERSION: 1}
    partials.take("a", [part(MAX_VERSION_SPANS, [5], version=2 + MAX_VERSION_SPANS)])
    assert partials.num_bytes == ROLLOUT_BYTES + 8 * (MAX_VERSION_SPANS + 1) + SPAN_BYTES * (MAX_VERSION_SPANS - 1)
    (carried,) = partials.begin(leases(8, "b", 0, goes_on=((0, 7),), may_move_on=True))
    assert len(carried.versions) == MAX_VERSION_SPANS
    partials.revoked(7)
    partials.revoked(8)
    assert partials.num_bytes == 0


@pytest.mark.parametrize(
    ("sent", "problem"),
    [
        (mixed(8, [5, 9, 2], by((3, 1), (5, 1)), num_given=2), "versions that cover 2 tokens instead of 3"),
        (mixed(8, [5, 9, 2], by((3, 2), (3, 1)), num_given=2), "versions that are not ascending: 3, 3"),
        (mixed(8, [5, 9, 2], by((5, 1), (3, 2)), num_given=2), "versions that are not ascending: 5, 3"),
        (mixed(8, [5, 9, 2], by((3, 1), (4, 2)), num_given=2), "other versions than were given"),
        (mixed(8, [5, 9, 2], by((2, 2), (4, 1)), num_given=2), "other versions than were given"),
        (
            mixed(8, [5, 9, 2], by((3, 2), (4, 1)), num_given=2).model_copy(update={"policy_version_start": 4}),
            "tokens by versions 3 to 4, said to be 4 to 4",
        ),
        (
            rollout(8, [5, 9, 2], num_given=2).model_copy(update={"policy_version_end": 4}),
            "versions 3 to 4, and not which tokens are whose",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_versions_that_cannot_be_are_named(mixing: Partials, sent: Rollout, problem: str) -> None:
    mixing.take("a", [part(0, [5, 9])])
    mixing.begin(leases(8, "b", 0, goes_on=((0, 7),), may_move_on=True))
    assert mixing.finish("b", sent) == FinishedPartial(problem=problem)


def test_a_nodes_own_tokens_are_no_older_than_its_lease(mixing: Partials) -> None:
    mixing.take("a", [part(0, [5, 9])])
    mixing.begin(replace(leases(8, "b", 0, 1, goes_on=((0, 7),), may_move_on=True), policy_version=5))
    told = "drawn by version 4, leased by 5"
    assert mixing.finish("b", mixed(8, [5, 9, 2], by((3, 2), (4, 1)), num_given=2)).problem == told
    old = rollout(8, [5, 2], num_given=0, index=1).model_copy(
        update={"policy_version_start": 4, "policy_version_end": 4}
    )
    assert mixing.finish("b", old).problem == told


def test_after_a_restart_tokens_of_older_versions_are_accepted() -> None:
    """Restarted hubs no longer know which prefix they gave to a node, so they cannot tell which tokens the node
    sampled.
    """
    row = UnfinishedRollout(
        rollout_id="8-0",
        lease_id=8,
        node_id="b",
        group_id=2,
        index=0,
        policy_version=5,
        deadline=9.0,
        state=ReceiptState.LEASED,
        reward=None,
    )
    partials = partials_of(BOUNDS, [row], interrupts=True, published_version=6)
    partials.take("b", [part(0, [5, 9], lease_id=8), part(2, [8], lease_id=8, version=6)])
    assert (shown(partials, 8), partials.refused) == ([5, 9, 8], {})
    end = partials.finish("b", mixed(8, [5, 9, 8, 2], by((3, 2), (6, 2)), num_given=2))
    assert end.problem == "" and who(end) == [("b", 3, 2), ("b", 6, 2)]


def test_after_a_restart_a_possibly_forged_prefix_blames_no_node() -> None:
    def row(index: int, *, others_held: bool) -> UnfinishedRollout:
        return UnfinishedRollout(
            rollout_id=f"8-{index}",
            lease_id=8,
            node_id="b",
            group_id=2,
            index=index,
            policy_version=3,
            deadline=9.0,
            state=ReceiptState.LEASED,
            reward=None,
            others_held=others_held,
        )

    partials = partials_of(BOUNDS, [row(0, others_held=True), row(1, others_held=True), row(3, others_held=False)])
    partials.take("b", [part(0, [5, 9], lease_id=8, index=index) for index in (0, 1, 3)])
    assert [shown(partials, 8, index) for index in (0, 1, 3)] == [None, None, [5, 9]], "no lease continues it"
    assert partials.finish("b", rollout(8, [5, 9, 2], num_given=2)) == FinishedPartial(is_unattributed=True)
    assert partials.finish("b", rollout(8, [5, 9, 2], num_given=0, index=1)) == FinishedPartial(), (
        "the node sampled all of it"
    )
    assert partials.finish("b", rollout(8, [5, 9, 2], num_given=2, index=3)) == FinishedPartial(), (
        "no other node held it"
    )
    assert partials.num_bytes == 0


def test_another_nodes_rollout_is_not_finished(partials: Partials) -> None:
    partials.take("a", [part(0, [5])])
    partials.finish("b", rollout(7, [5, 2], num_given=1))
    assert shown(partials) == [5]


def test_a_repeated_lease_keeps_its_tokens(partials: Partials) -> None:
    partials.take("a", [part(0, [5, 9])])
    partials.leased("a", 7, (0, 3), [prefix(0, [5])], policy_version=3)
    partials.take("a", [part(2, [8])])
    assert (shown(partials), partials.refused) == ([5, 9, 8], {})
    assert partials.num_bytes == 2 * ROLLOUT_BYTES + 8 * 3
    partials.leased("b", 7, (0,), policy_version=3)
    assert shown(partials) is None and partials.num_bytes == ROLLOUT_BYTES


def test_a_finished_rollout_is_forgotten_and_so_is_a_revoked_lease(partials: Partials) -> None:
    partials.take("a", [part(0, [5]), part(0, [6], index=3)])
    partials.arrived("a", 7, 0)
    assert (shown(partials), shown(partials, index=3)) == (None, [6])
    partials.take("a", [part(1, [6])])
    assert partials.refused == {PartRefusal.NOT_LEASED: 1}
    partials.revoked(7)
    partials.revoked(7)
    assert (shown(partials, index=3), partials.num_bytes) == (None, 0)
    partials.leased("a", 8, (0,), policy_version=3)
    partials.arrived("a", 8, 0)
    partials.arrived("a", 8, 0)
    assert partials.num_bytes == 0


def test_a_returned_rollout_is_kept_and_does_not_grow(partials: Partials) -> None:
    partials.take("a", [part(0, [5])])
    partials.given_back("a", 7, (0, 9))
    partials.take("a", [part(1, [6]), part(0, [4], index=3)])
    assert (shown(partials), shown(partials, index=3)) == ([5], [4])
    assert partials.refused == {PartRefusal.NOT_LEASED: 1}
    partials.forget(7, 0)
    assert shown(partials) is None


def test_the_longest_untouched_lease_makes_room() -> None:
    partials = Partials(BOUNDS, budget_bytes=3 * (ROLLOUT_BYTES + 8))
    for lease_id in (1, 2, 3):
        partials.leased("a", lease_id, (0,), policy_version=3)
        partials.take("a", [part(0, [5], lease_id=lease_id)])
    partials.take("a", [part(1, [6], lease_id=1)])
    assert [shown(partials, lease_id) for lease_id in (1, 2, 3)] == [[5, 6], None, [5]]
    partials.take("a", [part(1, [6], lease_id=2)])
    assert partials.refused == {PartRefusal.NOT_LEASED: 1}
    partials.leased("a", 4, range(1_000), policy_version=3)
    assert partials.num_bytes == 0, "one lease that is larger than the limit"


def test_a_restarted_hub_accepts_parts_that_nodes_held() -> None:
    def row(lease_id: int, index: int, state: ReceiptState) -> UnfinishedRollout:
        return UnfinishedRollout(
            rollout_id=f"{lease_id}-{index}",
            lease_id=lease_id,
            node_id="a",
            group_id=0,
            index=index,
            policy_version=3,
            deadline=0.0,
            state=state,
            reward=None,
        )

    rows = [row(7, 0, ReceiptState.LEASED), row(7, 3, ReceiptState.RECEIVED), row(8, 1, ReceiptState.LEASED)]
    partials = partials_of(BOUNDS, rows)
    partials.take("a", [part(0, [5]), part(0, [6], index=3), part(0, [7], lease_id=8, index=1)])
    assert (shown(partials), shown(partials, 7, 3), shown(partials, 8, 1)) == ([5], None, [7])
    assert partials.refused == {PartRefusal.NOT_LEASED: 1}


TELLINGS = st.lists(
    st.tuples(
        st.sampled_from(["lease", "go on", "finish", "part", "arrived", "revoked", "given back", "forget"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 3),
        st.integers(0, 2),
        st.integers(0, 12),
        st.lists(st.integers(-1, 51), max_size=12),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(TELLINGS, st.booleans())
def test_the_accounts_are_right_after_any_messages(
    tellings: list[tuple[str, str, int, int, int, list[int]]], interrupts: bool
) -> None:
    partials = Partials(BOUNDS, published_version=5, budget_bytes=6 * ROLLOUT_BYTES)
    for kind, node_id, lease_id, index, start, ids in tellings:
        if kind == "lease":
            partials.leased(node_id, lease_id, range(index + 1), policy_version=3)
        elif kind == "go on":
            goes_on = tuple((each, start % 4) for each in range(index + 1))
            partials.begin(leases(lease_id, node_id, *range(index + 1), goes_on=goes_on, may_move_on=interrupts))
        elif kind == "finish" and ids:
            partials.finish(node_id, rollout(lease_id, ids, num_given=start, index=index))
        elif kind == "part":
            version = 2 + len(ids) % 5
            partials.take(node_id, [part(start, ids, lease_id=lease_id, index=index, version=version)])
        elif kind == "arrived":
            partials.arrived(node_id, lease_id, index)
        elif kind == "revoked":
            partials.revoked(lease_id)
        elif kind == "given back":
            partials.given_back(node_id, lease_id, (index,))
        else:
            partials.forget(lease_id, index)
        assert partials.num_bytes <= 6 * ROLLOUT_BYTES
        assert partials.num_bytes == sum(lease.num_bytes for lease in partials._leases.values())
        for lease in (0, 1, 2, 3):
            found = shown(partials, lease, index)
            assert found is None or (len(found) < 10 and not {*found} & {1, 2, -1, 50, 51})
            kept = partials.prefix(lease, index)
            assert kept is None or version_spans.problem(kept.versions, len(kept.ids)) == ""
            assert kept is None or {span.policy_version for span in kept.versions} <= ({3, 4, 5} if interrupts else {3})
