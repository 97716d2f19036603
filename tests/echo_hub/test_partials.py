"""What nodes stream is kept as far as it follows; what does not follow is counted, whoever sends it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_hub.core.snapshot import RolloutRow
from echo_hub.partials import ROLLOUT_BYTES, Partials, PartRefusal, partials_of
from echo_hub.scoring.checks import SamplingBounds
from echo_shared.messages import ReceiptState, RolloutPart
from echo_shared.sampling import Prefix

BOUNDS = SamplingBounds(vocabulary_size=50, max_tokens=10, stop_ids=frozenset({1, 2}))


def part(
    start: int, ids: Sequence[int], *, lease_id: int = 7, index: int = 0, logprobs: Sequence[float] | None = None
) -> RolloutPart:
    values = [-token / 8 for token in ids] if logprobs is None else logprobs
    return RolloutPart(
        lease_id=lease_id,
        index=index,
        start=start,
        ids=np.array(ids, np.int32),
        logprobs=np.array(values, np.float32),
    )


def prefix(index: int, ids: Sequence[int]) -> Prefix:
    return Prefix(index=index, ids=np.array(ids, np.int32), logprobs=-np.array(ids, np.float32) / 8)


def shown(partials: Partials, lease_id: int = 7, index: int = 0) -> list[int] | None:
    found = partials.prefix(lease_id, index)
    if found is None:
        return None
    assert (found.index, found.ids.dtype, found.logprobs.dtype) == (index, np.int32, np.float32)
    assert found.logprobs.tolist() == [-token / 8 for token in found.ids]
    return list(found.ids.tolist())


@pytest.fixture
def partials() -> Partials:
    """Node a holds lease 7, of indices 0 and 3."""
    partials = Partials(BOUNDS)
    partials.leased("a", 7, (0, 3))
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
def test_what_does_not_follow_is_refused_with_a_reason_and_the_rest_taken(
    partials: Partials, bad: RolloutPart, reason: PartRefusal
) -> None:
    partials.take("a", [part(0, [5, 9, 8])])
    partials.take("a", [bad, part(3, [6])])
    assert partials.refused == {reason: 1}
    assert shown(partials) == [5, 9, 8, 6]


def test_another_nodes_lease_is_not_touched(partials: Partials) -> None:
    partials.leased("b", 8, (0,))
    partials.take("a", [part(0, [5])])
    partials.take("b", [part(1, [6]), part(0, [6])])
    partials.arrived("b", 7, 0)
    partials.given_back("b", 7, (0, 3))
    partials.take("a", [part(1, [7])])
    assert shown(partials) == [5, 7]
    assert partials.refused == {PartRefusal.NOT_LEASED: 2}


def test_a_node_that_is_back_sends_all_of_it_again(partials: Partials) -> None:
    """From token 0, in pieces, with what was drawn meanwhile; the log-probabilities that came first stay."""
    partials.take("a", [part(0, [5, 9, 8])])
    partials.take("a", [part(0, [5, 9], logprobs=[-4.0, -4.0]), part(2, [8, 7, 6])])
    assert shown(partials) == [5, 9, 8, 7, 6]
    assert partials.num_bytes == 2 * ROLLOUT_BYTES + 8 * 5


def test_who_goes_on_adds_to_what_was_given() -> None:
    partials = Partials(BOUNDS)
    partials.leased("b", 9, (0, 1), [prefix(0, [5, 9])])
    partials.take("b", [part(2, [8], lease_id=9), part(0, [4], lease_id=9, index=1)])
    assert (shown(partials, 9), shown(partials, 9, 1)) == ([5, 9, 8], [4])
    partials.take("b", [part(0, [5, 6, 7, 7], lease_id=9)])
    assert partials.refused == {PartRefusal.DIFFERENT: 1}, "what another node drew is not to be rewritten"


def test_a_lease_that_is_told_again_keeps_what_is_there(partials: Partials) -> None:
    partials.take("a", [part(0, [5, 9])])
    partials.leased("a", 7, (0, 3), [prefix(0, [5])])
    partials.take("a", [part(2, [8])])
    assert (shown(partials), partials.refused) == ([5, 9, 8], {})
    assert partials.num_bytes == 2 * ROLLOUT_BYTES + 8 * 3
    partials.leased("b", 7, (0,))
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
    partials.leased("a", 8, (0,))
    partials.arrived("a", 8, 0)
    partials.arrived("a", 8, 0)
    assert partials.num_bytes == 0


def test_what_was_given_back_is_kept_and_does_not_grow(partials: Partials) -> None:
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
        partials.leased("a", lease_id, (0,))
        partials.take("a", [part(0, [5], lease_id=lease_id)])
    assert partials.num_let_go == 0
    partials.take("a", [part(1, [6], lease_id=1)])
    assert [shown(partials, lease_id) for lease_id in (1, 2, 3)] == [[5, 6], None, [5]]
    assert partials.num_let_go == 1
    partials.take("a", [part(1, [6], lease_id=2)])
    assert partials.refused == {PartRefusal.NOT_LEASED: 1}
    partials.leased("a", 4, range(1_000))
    assert partials.num_bytes == 0, "one lease that is larger than all there is room for"


def test_a_hub_that_is_back_takes_what_nodes_held() -> None:
    def row(lease_id: int, index: int, state: ReceiptState) -> RolloutRow:
        return RolloutRow(
            rollout_id=f"{lease_id}-{index}",
            lease_id=lease_id,
            node_id="a",
            group_id=0,
            index=index,
            policy_version=0,
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
        st.sampled_from(["lease", "part", "arrived", "revoked", "given back", "forget"]),
        st.sampled_from(["a", "b"]),
        st.integers(0, 3),
        st.integers(0, 2),
        st.integers(0, 12),
        st.lists(st.integers(-1, 51), max_size=12),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(TELLINGS)
def test_whatever_is_told_the_books_are_right(tellings: list[tuple[str, str, int, int, int, list[int]]]) -> None:
    partials = Partials(BOUNDS, budget_bytes=6 * ROLLOUT_BYTES)
    for kind, node_id, lease_id, index, start, ids in tellings:
        if kind == "lease":
            partials.leased(node_id, lease_id, range(index + 1))
        elif kind == "part":
            partials.take(node_id, [part(start, ids, lease_id=lease_id, index=index)])
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
