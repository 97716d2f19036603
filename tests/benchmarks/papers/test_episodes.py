from __future__ import annotations

import pytest

from benchmarks.papers.episodes import Play, run_episodes
from benchmarks.papers.runs import COLOCATED, Case, carry_out
from echo_hub.core.accounting.groups import turn_seed
from tests.benchmarks.papers.toy import smaller

GAME = Case(name="", settings={"task": {"name": "environment:guess"}, "sampling": {"max_tokens": 4}}, runner="episodes")


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_what_an_environment_says_is_not_trained_on_and_turns_are_drawn_as_the_hub_draws_them() -> None:
    play = Play(smaller(GAME).config(1))
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
def test_of_one_turn_the_batch_is_that_of_a_virtual_run() -> None:
    case = smaller(COLOCATED)
    points, steps = run_episodes(case, 1)
    assert points == carry_out(case, 1).points
    assert len(steps) == 1
