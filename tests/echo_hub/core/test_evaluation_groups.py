from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from echo_hub.core.evaluation_groups import FIRST_EVALUATION_ID, EvaluationGroup, evaluation_ids
from echo_shared.wire.messages.fields import Count


@given(version=st.integers(0, 2**31 - 1), greedy=st.booleans(), number=st.integers(0, 99_999))
def test_an_evaluation_groups_id_encodes_its_content_and_fits_the_wire(version: int, greedy: bool, number: int) -> None:
    about = EvaluationGroup(policy_version=version, greedy=greedy, number=number)
    assert EvaluationGroup.of(about.group_id) == about
    assert about.group_id in evaluation_ids(version) and about.group_id not in evaluation_ids(version + 1)
    assert TypeAdapter(Count).validate_python(about.group_id) == about.group_id


@pytest.mark.parametrize("group_id", [0, 5, FIRST_EVALUATION_ID - 1])
def test_training_groups_are_not_evaluation_groups(group_id: int) -> None:
    assert EvaluationGroup.of(group_id) is None


def test_an_evaluations_groups_are_ordered_greedy_first() -> None:
    ids = [
        EvaluationGroup(policy_version=version, greedy=greedy, number=number).group_id
        for version in (0, 1)
        for greedy in (True, False)
        for number in (0, 1, 99_999)
    ]
    assert ids == sorted(set(ids)) and ids[0] == FIRST_EVALUATION_ID
