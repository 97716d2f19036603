from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from echo_hub.core.accounting.effects import DrawnTurn
from echo_hub.core.accounting.groups import turn_seed
from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.core.answer_groups import FIRST_ANSWER_ID
from echo_hub.core.evaluating import evaluation_seed
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.intake.episodes import TrainingBatches, answered_rollout, conversation, drawn_rollout, training_rollout
from echo_hub.scoring.asked import AskedGroup
from echo_hub.store.drawing import StoredDraw
from echo_hub.store.reading import AnsweredTurn, BatchEpisode, BatchTurn, StoredPayload
from echo_hub.verify.drawn import DrawnRollout
from echo_shared.records.rollout import DrawnSpan, RolloutPayload
from echo_shared.wire.messages import FinishReason


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def turn(
    drawn: np.ndarray,
    observed: np.ndarray,
    reason: FinishReason = FinishReason.STOP,
    *,
    version: int = 0,
    spans: tuple[DrawnSpan, ...] = (),
) -> BatchTurn:
    return BatchTurn(
        rollout_id="1-0",
        seed=2**64 - 1,
        index=6,
        payload=RolloutPayload(
            completion_ids=drawn,
            behavior_logprobs=-np.arange(1, len(drawn) + 1).astype(np.float32),
            finish_reason=reason,
            sampling_s=0.5,
            observation_ids=observed,
            spans=spans or (DrawnSpan(node_id="a", policy_version=version, num_tokens=len(drawn)),),
        ),
    )


def test_a_conversation_is_its_parts_in_order() -> None:
    turns = [
        AnsweredTurn(completion_ids=ids(3, 4), observation_ids=ids(5)),
        AnsweredTurn(completion_ids=ids(6), observation_ids=ids(7, 8)),
    ]
    assert conversation(ids(1, 2), []).tolist() == [1, 2]
    assert conversation(ids(1, 2), turns).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert conversation(ids(1, 2), turns).dtype == np.int32


def test_environment_tokens_are_masked_out() -> None:
    episode = BatchEpisode(turns=(turn(ids(3, 4), ids(5, 6, 7)), turn(ids(8), ids())), reward=0.75)
    rollout = training_rollout(episode)
    assert rollout.completion_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert rollout.loss_mask.tolist() == [True, True, False, False, False, True]
    assert rollout.behavior_logprobs.tolist() == [-1.0, -2.0, 0.0, 0.0, 0.0, -1.0]
    assert (rollout.reward, rollout.truncated, rollout.sampling_s) == (0.75, False, 1.0)
    assert rollout.draws.tolist() == [[2**64 - 1, 6, 2], [2**64 - 1, 6, 1]] and rollout.draws.dtype == np.uint64
    assert rollout.routes == b""
    assert (rollout.completion_ids.dtype, rollout.loss_mask.dtype, rollout.behavior_logprobs.dtype) == (
        np.int32,
        np.bool_,
        np.float32,
    )


def test_environment_tokens_have_no_route() -> None:
    first, last = turn(ids(3, 4), ids(5)), turn(ids(8), ids())
    first = replace(first, payload=replace(first.payload, routes=b"abcd"))
    rollout = training_rollout(BatchEpisode(turns=(first, last), reward=0.75))
    assert rollout.routes == b"abcd" + b"\xff" * 4
    alone = replace(first, payload=replace(first.payload, observation_ids=ids()))
    assert training_rollout(BatchEpisode(turns=(alone,), reward=0.0)).routes == b"abcd"


def test_turn_rewards_are_known_for_all_but_the_last_turn() -> None:
    turns = (replace(turn(ids(3), ids(5)), turn_reward=-0.5), replace(turn(ids(4), ids(5)), turn_reward=0.25))
    rollout = training_rollout(BatchEpisode(turns=(*turns, turn(ids(6), ids())), reward=1.0))
    assert rollout.turn_rewards.tolist() == [-0.5, 0.25] and rollout.turn_rewards.dtype == np.float64
    assert training_rollout(BatchEpisode(turns=(turn(ids(6), ids()),), reward=1.0)).turn_rewards.tolist() == []


def test_a_single_turn_is_trained_on_unchanged() -> None:
    rollout = training_rollout(BatchEpisode(turns=(turn(ids(3, 4), ids(), FinishReason.LENGTH),), reward=1.0))
    assert rollout.loss_mask.tolist() == [True, True] and rollout.truncated


def test_a_payload_in_memory_equals_the_stored_one() -> None:
    """Learners must get the same data from memory as from the store, for rollouts of one node and of two nodes in
    turn.
    """
    spans = (
        DrawnSpan(node_id="b", policy_version=1, num_tokens=1),
        DrawnSpan(node_id="a", policy_version=4, num_tokens=2),
    )
    for of_two in (spans, ()):
        seed = turn_seed(77, 0, 1)
        stored = replace(turn(ids(3, 4, 1), ids(), version=4, spans=of_two), seed=seed)
        payload = replace(stored.payload, spans=of_two)
        problems = cast(Any, SimpleNamespace(prompt_ids=lambda group_id: ids(group_id)))
        batches = TrainingBatches(cast(Any, None), problems)
        group = batches.at_hand(9, [DrawnTurn("1-0", "a", 4, 6, 77, 1, payload)])
        (found,) = group.rollouts
        expected = training_rollout(BatchEpisode(turns=(stored,), reward=None))
        assert group.prompt_ids.tolist() == [9]
        assert repr(found) == repr(expected)
        assert found.mean_version == (3.0 if of_two else 4.0)


def test_a_cut_in_any_turn_counts() -> None:
    cut, whole = turn(ids(3, 4), ids(5), FinishReason.LENGTH), turn(ids(6), ids())
    assert training_rollout(BatchEpisode(turns=(cut, whole), reward=1.0)).truncated
    assert not training_rollout(BatchEpisode(turns=(turn(ids(3), ids(5)), whole), reward=1.0)).truncated


def test_a_rollout_names_the_versions_of_its_tokens() -> None:
    mixed = turn(
        ids(3, 4, 5),
        ids(),
        spans=(
            DrawnSpan(node_id="a", policy_version=5, num_tokens=2),
            DrawnSpan(node_id="b", policy_version=8, num_tokens=1),
        ),
    )
    rollout = training_rollout(BatchEpisode(turns=(mixed,), reward=1.0))
    assert (rollout.mean_version, rollout.num_versions) == (6.0, 2)
    two_nodes = BatchEpisode(turns=(turn(ids(3), ids(9, 9), version=8), turn(ids(4), ids(), version=8)), reward=1.0)
    rollout = training_rollout(two_nodes)
    assert (rollout.mean_version, rollout.num_versions) == (8.0, 1)


class Prompts:
    def prompt_ids(self, group_id: int) -> np.ndarray:
        return ids(group_id % 100, 2)


def stored_draw(group_id: int, *, turns: int = 0, turn: int | None = None, failures: int = 0) -> StoredDraw:
    return StoredDraw(
        stored=StoredPayload(
            rollout_id="7-3",
            group_id=group_id,
            earlier_turns=tuple(
                AnsweredTurn(completion_ids=ids(10 + each), observation_ids=ids(20 + each)) for each in range(turns)
            ),
            payload=RolloutPayload(
                completion_ids=ids(5, 6),
                behavior_logprobs=np.array([-1, -2], np.float32),
                finish_reason=FinishReason.STOP,
                sampling_s=0.1,
                spans=(DrawnSpan(node_id="a", policy_version=3, num_tokens=2),),
            ),
        ),
        index=3,
        turn=turns if turn is None else turn,
        group_seed=None if EvaluationGroup.of(group_id) else 77,
        scorer_failures=failures,
    )


def checked(draw: StoredDraw) -> DrawnRollout | str:
    return drawn_rollout(draw, Prompts(), run_seed=9)  # type: ignore[arg-type]


@pytest.mark.parametrize(("temperature", "is_greedy"), [(1.5, False), (1e-9, True)])
def test_a_sample_is_checked_with_its_requests_values(temperature: float, is_greedy: bool) -> None:
    draw = stored_draw(FIRST_ANSWER_ID + 2)
    sampling = SamplingParameters(temperature=temperature, max_tokens=5)
    found = answered_rollout(draw, AskedGroup(prompt_ids=ids(8, 9), seed=31, sampling=sampling))
    assert isinstance(found, DrawnRollout)
    assert (found.prompt_ids.tolist(), found.seed, found.index) == ([8, 9], 31, 3)
    assert (found.temperature, found.is_greedy) == (temperature, is_greedy)
    assert "not kept" in str(answered_rollout(draw, None))


def test_a_draw_is_checked_with_its_leases_values() -> None:
    found = checked(stored_draw(4))
    assert isinstance(found, DrawnRollout)
    assert (found.rollout_id, found.index, found.seed, found.prompt_ids.tolist()) == ("7-3", 3, 77, [4, 2])
    assert found.completion_ids.tolist() == [5, 6] and found.spans[0].policy_version == 3
    again = checked(stored_draw(4, failures=2))
    assert isinstance(again, DrawnRollout) and again.seed == turn_seed(77, 0, 2)


def test_a_later_turn_is_checked_behind_the_whole_conversation() -> None:
    found = checked(stored_draw(4, turns=2))
    assert isinstance(found, DrawnRollout)
    assert (found.prompt_ids.tolist(), found.seed) == ([4, 2, 10, 20, 11, 21], turn_seed(77, 2))
    first = checked(stored_draw(4, turns=2, turn=0))
    assert isinstance(first, DrawnRollout) and first.prompt_ids.tolist() == [4, 2], "it was answered meanwhile"
    assert "not kept" in str(checked(stored_draw(4, turns=1, turn=2)))


def test_evaluation_rollouts_are_checked_as_sampled() -> None:
    sampled = EvaluationGroup(policy_version=2, greedy=False, number=11).group_id
    found = checked(stored_draw(sampled))
    assert isinstance(found, DrawnRollout) and found.seed == evaluation_seed(9, 11) and not found.is_greedy
    chosen = checked(stored_draw(EvaluationGroup(policy_version=2, greedy=True, number=11).group_id))
    assert isinstance(chosen, DrawnRollout) and chosen.is_greedy
