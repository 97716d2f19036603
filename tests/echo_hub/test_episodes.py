from __future__ import annotations

from dataclasses import replace

import numpy as np

from echo_hub.core.payload import Span
from echo_hub.episodes import conversation, training_rollout
from echo_hub.store.reading import AnsweredTurn, BatchEpisode, BatchTurn
from echo_shared.messages import FinishReason


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def turn(
    drawn: np.ndarray, observed: np.ndarray, reason: FinishReason = FinishReason.STOP, *, version: int = 0
) -> BatchTurn:
    return BatchTurn(
        rollout_id="1-0",
        node_id="a",
        spans=(Span(node_id="a", policy_version=version, num_tokens=len(drawn)),),
        completion_ids=drawn,
        behavior_logprobs=-np.arange(1, len(drawn) + 1).astype(np.float32),
        observation_ids=observed,
        finish_reason=reason,
    )


def test_a_conversation_is_its_parts_in_order() -> None:
    turns = [
        AnsweredTurn(completion_ids=ids(3, 4), observation_ids=ids(5)),
        AnsweredTurn(completion_ids=ids(6), observation_ids=ids(7, 8)),
    ]
    assert conversation(ids(1, 2), []).tolist() == [1, 2]
    assert conversation(ids(1, 2), turns).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert conversation(ids(1, 2), turns).dtype == np.int32


def test_what_the_environment_said_is_masked_out() -> None:
    episode = BatchEpisode(turns=(turn(ids(3, 4), ids(5, 6, 7)), turn(ids(8), ids())), reward=0.75)
    rollout = training_rollout(episode)
    assert rollout.completion_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert rollout.loss_mask.tolist() == [True, True, False, False, False, True]
    assert rollout.behavior_logprobs.tolist() == [-1.0, -2.0, 0.0, 0.0, 0.0, -1.0]
    assert (rollout.reward, rollout.truncated) == (0.75, False)
    assert (rollout.completion_ids.dtype, rollout.loss_mask.dtype, rollout.behavior_logprobs.dtype) == (
        np.int32,
        np.bool_,
        np.float32,
    )


def test_a_single_turn_is_trained_on_as_it_is() -> None:
    rollout = training_rollout(BatchEpisode(turns=(turn(ids(3, 4), ids(), FinishReason.LENGTH),), reward=1.0))
    assert rollout.loss_mask.tolist() == [True, True] and rollout.truncated


def test_a_cut_in_any_turn_counts() -> None:
    cut, whole = turn(ids(3, 4), ids(5), FinishReason.LENGTH), turn(ids(6), ids())
    assert training_rollout(BatchEpisode(turns=(cut, whole), reward=1.0)).truncated
    assert not training_rollout(BatchEpisode(turns=(turn(ids(3), ids(5)), whole), reward=1.0)).truncated


def test_a_rollout_says_how_old_its_tokens_are() -> None:
    mixed = replace(
        turn(ids(3, 4, 5), ids()),
        spans=(
            Span(node_id="a", policy_version=5, num_tokens=2),
            Span(node_id="b", policy_version=8, num_tokens=1),
        ),
    )
    rollout = training_rollout(BatchEpisode(turns=(mixed,), reward=1.0))
    assert (rollout.mean_version, rollout.num_versions) == (6.0, 2)
    two_nodes = BatchEpisode(turns=(turn(ids(3), ids(9, 9), version=8), turn(ids(4), ids(), version=8)), reward=1.0)
    rollout = training_rollout(two_nodes)
    assert (rollout.mean_version, rollout.num_versions) == (8.0, 1)
