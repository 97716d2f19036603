from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from echo_hub.core.accounting.effects import AnswerOpened, AnswersCancelled, RolloutsAnswered, RolloutsDropped
from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.answer_groups import FIRST_ANSWER_ID, AnswerGroup, AnswerMember
from echo_hub.store.answers import (
    read_answer_groups,
    read_answered,
    read_next_answer_id,
    settle_answers,
)
from echo_hub.store.credits import read_credits
from echo_hub.store.keeping import read_kept_totals
from echo_hub.store.reading import read_payloads, read_receipts
from echo_hub.store.reports import read_accounting
from echo_hub.store.retiring import read_old_answers, retire_answers
from echo_hub.store.store import Store
from echo_hub.store.unfinished import read_snapshot
from echo_hub.store.whole_run import read_evaluation_groups_after
from echo_shared.errors import LocalProtocolError
from echo_shared.wire.messages import DropReason, ReceiptState

GROUP = AnswerGroup(
    group_id=FIRST_ANSWER_ID + 3,
    tenant_id="ada",
    prompt_ids=np.array([5, 6, 7], np.int32),
    policy_version=2**30 + 1,
    seed=2**64 - 1,
    sampling=SamplingParameters(temperature=0.5, max_tokens=7, stop_ids=(2, 3), stop_strings=("\n\n",)),
    is_checked=True,
    members=(
        AnswerMember(request_id="r0", num_samples=2),
        AnswerMember(request_id="r1", num_samples=1, first_index=4),
    ),
)


@pytest.fixture
def opened(store: Store, records: Any) -> Iterator[Store]:
    """Yield a store with one group of three samples for a tenant. Two of the samples are received."""
    lease = replace(records.leased(1, GROUP.group_id, 0, 1, 4), policy_version=GROUP.policy_version)
    store.apply([AnswerOpened(group=GROUP), lease, *records.received("1-0", "1-4")], now=2.0)
    yield store


def test_a_group_is_restored_as_it_was_opened(opened: Store) -> None:
    (found,) = opened.read(read_snapshot).answers
    assert found.prompt_ids.tolist() == [5, 6, 7]
    for name in ("group_id", "tenant_id", "policy_version", "seed", "sampling", "is_checked", "members"):
        assert getattr(found, name) == getattr(GROUP, name), name
    assert list(opened.read(read_answer_groups, [GROUP.group_id, 5])) == [GROUP.group_id]
    assert opened.read(read_next_answer_id) == GROUP.group_id + 1
    assert opened.read(read_evaluation_groups_after, -1, 5) == [], "no evaluation has such ids"


def test_answered_samples_are_receipted_and_credited(opened: Store) -> None:
    opened.apply([RolloutsAnswered(rollout_ids=("1-0",)), RolloutsAnswered(rollout_ids=("1-4",))], now=3.0)
    dropped = RolloutsDropped(rollout_ids=("1-1",), reason=DropReason.REVOKED)
    opened.apply([dropped, AnswersCancelled(group_id=GROUP.group_id, request_id="r0")], now=4.0)
    books = opened.read(read_accounting)
    assert (books.leased, books.answered, books.num_dropped, books.in_flight) == (3, 2, 1, 0) and books.balanced
    assert [one.state for one in opened.read(read_receipts, "a", ["1-0", "1-4"])] == [ReceiptState.ANSWERED] * 2
    credit = opened.read(read_credits, ["a"])["a"]
    assert (credit.answered, credit.share, credit.rank, dict(credit.dropped)) == (2, 1.0, 1, {"revoked": 1})
    snapshot = opened.read(read_snapshot)
    assert snapshot.answered == {(GROUP.group_id, 0), (GROUP.group_id, 4)}
    assert [member.is_cancelled for member in snapshot.answers[0].members] == [True, False]
    assert opened.read(read_answered, [GROUP.group_id]) == {(GROUP.group_id, 0): "1-0", (GROUP.group_id, 4): "1-4"}


def test_only_a_received_rollout_can_be_answered(opened: Store) -> None:
    with pytest.raises(LocalProtocolError, match="0 of 1 rollouts could be answered"):
        opened.apply([RolloutsAnswered(rollout_ids=("1-1",))], now=3.0)


def test_a_settled_group_leaves_its_receipts_and_nothing_to_read(opened: Store) -> None:
    opened.apply([RolloutsAnswered(rollout_ids=("1-0", "1-4"))], now=3.0)
    assert len(opened.read(read_payloads, ["1-0", "1-4"])) == 2
    opened.write(settle_answers, [GROUP.group_id])
    assert opened.read(read_payloads, ["1-0", "1-4"]) == []
    assert opened.read(read_snapshot).answers == () and opened.read(read_answer_groups, [GROUP.group_id]) == {}
    assert opened.read(read_receipts, "a", ["1-0"])[0].state is ReceiptState.ANSWERED
    assert opened.read(read_next_answer_id) == GROUP.group_id + 1, "its rollouts keep the number in use"
    assert opened.read(read_accounting).answered == 2


def test_old_samples_leave_their_receipts_and_their_number(opened: Store, records: Any) -> None:
    opened.apply([RolloutsAnswered(rollout_ids=("1-0", "1-4"))], now=100.0)
    dropped = RolloutsDropped(rollout_ids=("1-1",), reason=DropReason.REVOKED)
    opened.apply([dropped, *records.one_step(1, lease_id=2, group_id=0, node_id="b")], now=100.0)
    before = opened.read(read_receipts, "a", ["1-0", "1-1", "1-4"]), opened.read(read_accounting)
    assert {key for _, key in opened.read(read_old_answers, 1e9)} == {(1, 1)}, "the others' tokens may be read again"
    opened.write(settle_answers, [GROUP.group_id])
    assert opened.read(read_old_answers, 100.0) == []
    old = opened.read(read_old_answers, 101.0)
    assert [key for _, key in old] == [(1, 0), (1, 1), (1, 4)]
    assert opened.write(retire_answers, old) == 3 and opened.write(retire_answers, old) == 0
    assert opened.read(read_old_answers, 1e9) == []
    assert (opened.read(read_receipts, "a", ["1-0", "1-1", "1-4"]), opened.read(read_accounting)) == before
    assert opened.read(read_next_answer_id) == GROUP.group_id + 1, "no later group may have the same number"
    assert opened.read(read_kept_totals).rollouts_retired == 0


def test_no_copies_of_dropped_samples_are_kept(opened: Store) -> None:
    opened.apply([RolloutsDropped(rollout_ids=("1-0",), reason=DropReason.FORGED)], now=3.0)
    with opened.engine.connect() as connection:
        assert connection.exec_driver_sql("SELECT count(*) FROM kept").scalar() == 0
