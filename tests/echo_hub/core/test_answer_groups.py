from __future__ import annotations

import numpy as np

from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.answer_groups import (
    FIRST_ANSWER_ID,
    AnswerGroup,
    AnswerMember,
    is_answer,
)
from echo_hub.core.evaluation_groups import EvaluationGroup, evaluation_ids
from echo_shared.wire.messages import MAX_GROUP_SIZE
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION


def test_ids_of_the_three_kinds_of_groups_do_not_overlap() -> None:
    ids = evaluation_ids(FIRST_TENANT_VERSION)
    assert not is_answer(0) and not is_answer(ids[-1]) and EvaluationGroup.of(ids[0]) is not None
    assert is_answer(FIRST_ANSWER_ID) and EvaluationGroup.of(FIRST_ANSWER_ID) is None
    assert FIRST_ANSWER_ID < 2**53 and FIRST_TENANT_VERSION < 2**31


def test_a_group_knows_the_indices_of_its_requests() -> None:
    group = AnswerGroup(
        group_id=FIRST_ANSWER_ID,
        tenant_id="t",
        prompt_ids=np.array([1], np.int32),
        policy_version=0,
        seed=1,
        sampling=SamplingParameters(temperature=1.0, max_tokens=4),
        is_checked=False,
        members=(
            AnswerMember(request_id="a", num_samples=2),
            AnswerMember(request_id="b", num_samples=1, first_index=2, is_cancelled=True),
            AnswerMember(request_id="c", num_samples=3, first_index=5),
        ),
    )
    assert group.wanted == {0, 1, 5, 6, 7} and group.end == 8 < MAX_GROUP_SIZE
