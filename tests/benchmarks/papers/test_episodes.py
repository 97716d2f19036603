from __future__ import annotations

import pytest

from benchmarks.papers.cases import COLOCATED, Case, smaller
from benchmarks.papers.episodes import Play, run_episodes
from echo_hub.core.leasing import turn_seed

SIZES = {"training": {"steps": 1, "groups_per_step": 2, "group_size": 2}, "evaluation": {"problems": 4}}
GAME = Case(name="", settings={"task": {"name": "environment:guess"}, "sampling": {"max_tokens": 4}}, runner="episodes")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_environment_texts_are_not_trained_on_and_turns_use_the_hubs_draws() -> None:
    play = Play(smaller(GAME, SIZES).config(1))
    groups = play.groups(0)
    assert [len(group.rollouts) for group in groups] == [2, 2]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    several = [rollout for rollout in rollouts if len(rollout.draws) > 1]
    assert several, "a guessing game takes several turns"
    for rollout in several:
        assert not rollout.loss_mask.all()
        assert rollout.draws[:, 2].sum() == rollout.loss_mask.sum()
        assert (rollout.behavior_logprobs[~rollout.loss_mask] == 0).all()
        assert (rollout.behavior_logprobs[rollout.loss_mask] < 0).all()
    seed = play.problems.seed(0)
    assert [int(one) for one in groups[0].rollouts[0].draws[:, 0]] == [
        turn_seed(seed, turn) for turn in range(len(groups[0].rollouts[0].draws))
    ]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_with_one_turn_the_batch_equals_a_virtual_runs() -> None:
    from benchmarks.papers.ran import carry_out

    case = smaller(COLOCATED, SIZES)
    points, steps = run_episodes(case, 1)
    assert points == carry_out(case, 1).points
    assert len(steps) == 1
