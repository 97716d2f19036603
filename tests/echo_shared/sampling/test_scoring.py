from __future__ import annotations

import numpy as np

from echo_shared.sampling.scoring import LEAST_LOGPROB, Scored, ScoreRequest


def test_each_version_gets_the_tokens_up_to_the_end_of_its_span() -> None:
    request = ScoreRequest(
        rollout_id="1-0",
        prompt_ids=np.array([7, 8], np.int32),
        completion_ids=np.array([1, 2, 3], np.int32),
        versions=((4, 2), (5, 1)),
        temperature=1.0,
    )
    spans = [(version, ids.tolist(), first) for version, ids, first in request.spans()]
    assert spans == [(4, [7, 8, 1, 2], 2), (5, [7, 8, 1, 2, 3], 4)]


def test_reported_scores_are_finite() -> None:
    found = [(np.array([0.0, 1.0 + 1e-12]), np.array([-np.inf, 1e-12])), (np.array([0.5]), np.array([-1.0]))]
    scored = Scored.of("1-0", found)
    assert scored.below.tolist() == [0.0, 1.0, 0.5] and scored.logprobs.tolist() == [LEAST_LOGPROB, 0.0, -1.0]
    assert len(Scored.of("1-0", [(np.array([np.nan]), np.array([-1.0]))]).below) == 0
    assert len(Scored.of("1-0", []).logprobs) == 0
