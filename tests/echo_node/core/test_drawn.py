"""Sampled tokens on the node: they accumulate, are sent in messages of limited size, and are continued after a
restart.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from echo_node.core.drawn import DrawnByLease
from echo_shared.sampling.interface import DrawnPart, FinishedRollout
from echo_shared.sampling.version_spans import Spans
from echo_shared.wire.codec import decode_from_node, encode
from echo_shared.wire.messages import (
    MAX_GROUP_SIZE,
    FinishReason,
    Lease,
    LeasedPrefix,
    RolloutParts,
    VersionSpan,
)
from echo_shared.wire.messages.fields import MAX_TOKENS
from tests.echo_node.core.loop_parts import lease


def part(lease_id: int, index: int, start: int, *ids: int, version: int = 0) -> DrawnPart:
    return DrawnPart(
        lease_id=lease_id,
        index=index,
        policy_version=version,
        start=start,
        ids=np.array(ids, np.int32),
        logprobs=-np.array(ids, np.float32),
    )


def ended(lease_id: int, index: int, *ids: int, version: int = 0) -> FinishedRollout:
    return FinishedRollout(
        lease_id=lease_id,
        group_id=lease_id,
        index=index,
        policy_version=version,
        completion_ids=np.array(ids, np.int32),
        behavior_logprobs=-np.array(ids, np.float32),
        finish_reason=FinishReason.LENGTH,
        sampling_s=0.1,
    )


def spans(*pairs: tuple[int, int]) -> Spans:
    return tuple(VersionSpan(policy_version=version, num_tokens=count) for version, count in pairs)


def continued(lease_id: int, index: int, *ids: int) -> Lease:
    given = LeasedPrefix(index=index, ids=np.array(ids, np.int32), logprobs=-np.array(ids, np.float32))
    return lease(lease_id).model_copy(update={"prefixes": (given,)})


def shown(messages: list[RolloutParts]) -> list[tuple[int, int, int, list[int]]]:
    return [(one.lease_id, one.index, one.start, one.ids.tolist()) for message in messages for one in message.parts]


def test_sampled_tokens_are_sent_once() -> None:
    drawn = DrawnByLease()
    drawn.begin(lease(1), {0, 1})
    assert drawn.take_unsent() == []
    drawn.add(part(1, 0, 0, 5, 6))
    drawn.add(part(1, 1, 0, 7))
    assert shown(drawn.take_unsent()) == [(1, 0, 0, [5, 6]), (1, 1, 0, [7])]
    drawn.add(part(1, 0, 2, 8))
    assert shown(drawn.take_unsent()) == [(1, 0, 2, [8])]
    assert drawn.take_unsent() == []


def test_on_a_new_connection_all_tokens_are_sent_again() -> None:
    drawn = DrawnByLease()
    drawn.begin(continued(1, 1, 3, 4), {0, 1})
    assert drawn.take_unsent() == [], "the hub has just given these tokens"
    drawn.add(part(1, 1, 2, 5))
    assert shown(drawn.take_unsent()) == [(1, 1, 2, [5])]
    drawn.connected()
    messages = drawn.take_unsent()
    assert shown(messages) == [(1, 1, 0, [3, 4, 5])]
    assert messages[0].parts[0].logprobs.tolist() == [-3.0, -4.0, -5.0]


def test_an_engine_continues_from_given_and_sampled_tokens() -> None:
    drawn = DrawnByLease()
    drawn.begin(continued(1, 0, 3), {0, 1, 2})
    drawn.add(part(1, 0, 1, 4))
    drawn.add(part(1, 2, 0, 6))
    found = {one.index: (one.ids.tolist(), one.logprobs.tolist()) for one in drawn.prefixes(1, (0, 1, 2))}
    assert found == {0: ([3, 4], [-3.0, -4.0]), 2: ([6], [-6.0])}
    assert drawn.prefixes(9, (0,)) == ()


def test_parts_that_do_not_follow_or_belong_to_no_lease_are_dropped() -> None:
    drawn = DrawnByLease()
    drawn.begin(lease(1), {0})
    for late in (part(1, 0, 3, 5), part(1, 1, 0, 5), part(2, 0, 0, 5)):
        drawn.add(late)
    drawn.add(part(1, 0, 0, 5))
    drawn.add(part(1, 0, 0, 5))
    assert shown(drawn.take_unsent()) == [(1, 0, 0, [5])]


def test_a_finished_rollout_says_how_many_tokens_were_given() -> None:
    drawn = DrawnByLease()
    drawn.begin(continued(1, 0, 3, 4), {0, 1})
    drawn.add(part(1, 0, 2, 5))
    drawn.add(part(1, 1, 0, 6))
    end = drawn.end(ended(1, 0, 3, 4, 5, 1))
    assert (end.num_given, end.policy_version_start, end.versions) == (2, 0, ())
    assert [drawn.end(ended(*known, 5)).num_given for known in ((1, 0), (7, 0))] == [0, 0]
    assert shown(drawn.take_unsent()) == [(1, 1, 0, [6])]
    drawn.connected()
    drawn.forget(1)
    drawn.forget(7)
    assert drawn.take_unsent() == []


def test_every_token_keeps_its_version() -> None:
    drawn = DrawnByLease()
    given = LeasedPrefix(
        index=0, ids=np.array([3, 4], np.int32), logprobs=np.zeros(2, np.float32), versions=spans((5, 1), (7, 1))
    )
    drawn.begin(lease(1, version=7).model_copy(update={"prefixes": (given,)}), {0, 1})
    drawn.add(part(1, 0, 2, 5, version=7))
    drawn.add(part(1, 0, 3, 6, 7, version=9))
    drawn.add(part(1, 1, 0, 8, version=9))
    assert (drawn.num_drawn(1, 0), drawn.num_drawn(1, 1), drawn.num_drawn(9, 0)) == (5, 1, 0)
    assert (drawn.versions(1), drawn.versions(9)) == ({5, 7, 9}, set())
    parts = [(one.index, one.start, one.policy_version, one.ids.tolist()) for one in drawn.take_unsent()[0].parts]
    assert parts == [(0, 2, 7, [5]), (0, 3, 9, [6, 7]), (1, 0, 9, [8])]
    drawn.connected()
    sent = [(one.start, one.policy_version, len(one.ids)) for one in drawn.take_unsent()[0].parts if one.index == 0]
    assert sent == [(0, 5, 1), (1, 7, 2), (3, 9, 2)]
    end = drawn.end(ended(1, 0, 3, 4, 5, 6, 7, 1, version=9))
    assert (end.num_given, end.versions) == (2, spans((5, 1), (7, 2), (9, 3)))
    end = drawn.end(ended(1, 1, 8, 1, version=11))
    assert (end.num_given, end.versions) == (0, spans((9, 1), (11, 1)))


def test_a_rollouts_time_includes_all_its_parts() -> None:
    drawn = DrawnByLease()
    drawn.begin(lease(1), {0, 1})
    drawn.prefixes(1, (0, 1))
    drawn.add(replace(part(1, 0, 0, 5), sampling_s=3.0))
    drawn.add(replace(part(1, 0, 1, 6), sampling_s=4.0))
    drawn.prefixes(1, (0, 1))
    drawn.add(replace(part(1, 0, 2, 7, version=1), sampling_s=2.0))
    drawn.prefixes(1, (0, 1))
    assert drawn.end(replace(ended(1, 0, 5, 6, 7, 1, version=2), sampling_s=0.5)).sampling_s == 6.5
    assert drawn.end(replace(ended(1, 1, 5), sampling_s=0.5)).sampling_s == 0.5


def test_a_prefix_without_versions_has_its_leases_version() -> None:
    drawn = DrawnByLease()
    drawn.begin(continued(1, 0, 3, 4).model_copy(update={"policy_version": 6}), {0})
    end = drawn.end(ended(1, 0, 3, 4, 1, version=8))
    assert (end.num_given, end.versions) == (2, spans((6, 2), (8, 1)))


def test_messages_keep_the_wires_bounds() -> None:
    drawn = DrawnByLease()
    drawn.begin(lease(1), {0, 1})
    long = np.zeros(MAX_TOKENS - 1, np.int32)
    for index in (0, 1):
        drawn.add(part(1, index, 0, *long.tolist()))
    drawn.begin(lease(2), set(range(MAX_GROUP_SIZE + 1)))
    for index in range(MAX_GROUP_SIZE + 1):
        drawn.add(part(2, index, 0, index))
    messages = drawn.take_unsent()
    told: dict[tuple[int, int], int] = {}
    for message in messages:
        decode_from_node(encode(message))
        for one in message.parts:
            assert told.get((one.lease_id, one.index), 0) == one.start
            told[one.lease_id, one.index] = one.start + len(one.ids)
    assert (told[1, 0], told[1, 1], len(told)) == (len(long), len(long), 2 + MAX_GROUP_SIZE + 1)
