from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from echo_hub.verify.drawn import DrawnRollout
from echo_hub.verify.repeats import RepeatedTokens
from echo_shared.records.rollout import DrawnSpan
from echo_shared.wire.messages import FinishReason


def drawn(
    rollout_id: str,
    ids: Sequence[int],
    *,
    prompt: int = 7,
    temperature: float | None = 0.2,
    nodes: Sequence[str] = ("a",),
    version: int = 3,
) -> DrawnRollout:
    """Return a rollout in which each node but the last drew one token, and the last one the rest."""
    counts = [1] * (len(nodes) - 1)
    spans = zip(nodes, [*counts, len(ids) - len(counts)], strict=True)
    return DrawnRollout(
        rollout_id=rollout_id,
        prompt_ids=np.array([prompt], np.int32),
        completion_ids=np.array(ids, np.int32),
        behavior_logprobs=np.zeros(len(ids), np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.1,
        spans=tuple(DrawnSpan(node_id=node, policy_version=version, num_tokens=count) for node, count in spans),
        seed=1,
        index=0,
        temperature=temperature,
    )


def test_a_token_after_the_same_tokens_counts_less_each_time() -> None:
    repeats = RepeatedTokens()
    assert repeats.weights(drawn("1-0", [5, 6, 8])).draws.tolist() == [1.0, 1.0, 1.0]
    assert repeats.weights(drawn("1-1", [5, 6, 8])).draws.tolist() == [0.5, 0.5, 0.5]
    assert repeats.weights(drawn("1-2", [5, 9, 8])).draws.tolist() == pytest.approx([1 / 3, 1.0, 1.0])
    assert repeats.weights(drawn("1-1", [5, 6, 8])).draws.tolist() == [0.5, 0.5, 0.5], "a second check of one rollout"


@pytest.mark.parametrize(
    "other",
    [
        drawn("1-1", [5, 6], prompt=8),
        drawn("1-1", [5, 6], nodes=("b",)),
        drawn("1-1", [5, 6], version=4),
        drawn("1-1", [5, 6], temperature=0.3),
    ],
    ids=["prompt", "node", "version", "temperature"],
)
def test_other_contexts_are_no_repetitions(other: DrawnRollout) -> None:
    repeats = RepeatedTokens()
    repeats.weights(drawn("1-0", [5, 6]))
    assert repeats.weights(other).draws.tolist() == [1.0, 1.0]


def test_each_nodes_tokens_of_one_rollout_are_its_own() -> None:
    repeats = RepeatedTokens()
    repeats.weights(drawn("1-0", [5, 6, 8], nodes=("b",)))
    assert repeats.weights(drawn("1-1", [5, 6, 8], nodes=("a", "b"))).draws.tolist() == [1.0, 0.5, 0.5]


def test_draws_of_the_runs_own_prompts_keep_their_weight() -> None:
    repeats = RepeatedTokens()
    for number in range(3):
        weights = repeats.weights(drawn(f"1-{number}", [5], temperature=None))
        assert (weights.draws.tolist(), weights.claims.tolist()) == ([1.0], [1 / (1 + number)])


def test_old_tokens_are_forgotten() -> None:
    repeats = RepeatedTokens(most_tokens=2, most_rollouts=1)
    repeats.weights(drawn("1-0", [5, 6]))
    repeats.weights(drawn("1-1", [8]))
    assert repeats.weights(drawn("1-2", [5, 6])).draws.tolist() == [1.0, 1.0]
    assert repeats.weights(drawn("1-1", [8])).draws.tolist() == [1.0]
