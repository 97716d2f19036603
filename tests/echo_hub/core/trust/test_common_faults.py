from __future__ import annotations

from echo_hub.core.trust.common_faults import KEPT, MOST_NODES, CommonFaults
from echo_hub.core.trust.numerics import NumericsClass

CAUSE = (NumericsClass("mlx", "f32", "metal"), "version", 7)
OTHER = (NumericsClass("mlx", "f32", "metal"), "version", 8)


def checked(faults: CommonFaults, names: str, *, failed: bool, established: bool = False, cause=CAUSE) -> None:
    for name in names:
        faults.note(cause, name, is_established=established, failed=failed)


def test_two_nodes_that_fail_are_no_common_fault() -> None:
    faults = CommonFaults()
    checked(faults, "ab", failed=True)
    assert faults.suspended((CAUSE,)) is None and faults.all_suspended == ()


def test_three_failures_are_a_common_fault_if_they_are_half_of_the_checked() -> None:
    faults = CommonFaults()
    checked(faults, "abc", failed=True)
    assert faults.suspended((OTHER, CAUSE)) == CAUSE
    assert faults.failed(CAUSE) == ("a", "b", "c")
    checked(faults, "def", failed=False)
    assert faults.all_suspended == (CAUSE,)
    checked(faults, "g", failed=False)
    assert faults.suspended((CAUSE,)) is None


def test_a_node_counts_once_for_all_its_failures() -> None:
    faults = CommonFaults()
    checked(faults, "aaabbb", failed=True)
    assert faults.suspended((CAUSE,)) is None


def test_new_keys_have_no_vote_where_established_nodes_have_one() -> None:
    faults = CommonFaults()
    checked(faults, "x", failed=False, established=True)
    checked(faults, "abcdefgh", failed=True)
    assert faults.suspended((CAUSE,)) is None
    checked(faults, "yzw", failed=True, established=True)
    assert faults.suspended((CAUSE,)) == CAUSE


def test_a_node_established_when_checked_stays_so_for_the_count() -> None:
    faults = CommonFaults()
    checked(faults, "xyz", failed=False, established=True)
    checked(faults, "xyz", failed=True)
    assert faults.suspended((CAUSE,)) == CAUSE


def test_memory_is_bounded() -> None:
    faults = CommonFaults()
    checked(faults, "abc", failed=True)
    for number in range(KEPT):
        checked(faults, "a", failed=False, cause=(CAUSE[0], "group", number))
    assert faults.suspended((CAUSE,)) is None
    for number in range(MOST_NODES + 5):
        faults.note(OTHER, f"n{number}", is_established=False, failed=True)
    assert len(faults.failed(OTHER)) == MOST_NODES
