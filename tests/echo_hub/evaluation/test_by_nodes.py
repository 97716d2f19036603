from __future__ import annotations

import asyncio
from typing import Any, cast

import numpy as np
import pytest

from echo_hub.config.task_sections import ChosenSet
from echo_hub.core.accounting.events import EvaluationAbandoned, EvaluationWanted, Event
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.driving.event_queue import EventQueue
from echo_hub.driving.progress import RunProgress
from echo_hub.evaluation import by_nodes
from echo_hub.evaluation.by_nodes import GREEDY_TEMPERATURE, NodeEvaluations, figures, of_sets
from echo_hub.net.live_nodes import LiveNodes
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.reading import EvaluatedEpisode, read_evaluated
from echo_hub.tasks.rewards import RewardBounds
from echo_node.backends.draw_rows import draw_rows
from echo_shared.records.rewards import Reward
from echo_shared.records.run import EvaluationKind, LiveNode
from echo_shared.sampling import draws


def episode(number: int, reward: float | None, *, greedy: bool = False, at: float = 0.0) -> EvaluatedEpisode:
    return EvaluatedEpisode(
        about=EvaluationGroup(policy_version=6, greedy=greedy, number=number),
        num_tokens=4,
        truncated=reward == 0.0,
        reward=reward,
        leased_at=10.0 + at,
        received_at=12.0 + at,
    )


ONE = ChosenSet(name="", task="", problems=2, samples=3, weight=1.0, first=0)
EPISODES = [
    episode(0, 1.0, greedy=True),
    episode(1, 0.0, greedy=True, at=3.0),
    *(episode(0, reward) for reward in (1.0, 1.0, 0.0)),
    *(episode(1, reward) for reward in (1.0, 0.0, None)),
]


def test_the_figures_by_hand() -> None:
    greedy, sampled = figures(6, EPISODES, rewards=RewardBounds())
    assert (greedy.kind, greedy.samples, greedy.num_problems, greedy.accuracy) == (EvaluationKind.GREEDY, 1, 2, 0.5)
    assert (greedy.seconds, greedy.share_truncated, greedy.mean_tokens) == (5.0, 0.5, 4.0)
    assert (sampled.samples, sampled.num_unscored, sampled.seconds) == (3, 1, 2.0)
    assert sampled.accuracy == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert sampled.pass_at == {2: pytest.approx((1.0 + 1.0) / 2), 3: 1.0}


def test_accuracy_goes_by_the_score_where_a_reward_has_components() -> None:
    bounds = RewardBounds(lowest=0.0, highest=1.5, of_score=RewardBounds())
    rewards = [Reward(1.0, {"score": 1.0, "format": 0.0}), Reward(0.5, {"score": 0.0, "format": 1.0})]
    (greedy,) = figures(
        6, [episode(number, reward, greedy=True) for number, reward in enumerate(rewards)], rewards=bounds
    )
    assert (greedy.accuracy, greedy.mean_reward) == (0.5, 0.75)
    assert greedy.components == {"score": 0.5, "format": 0.5}


def test_several_sets_each_have_their_figures_and_the_runs_are_their_weighted_mean() -> None:
    first = ChosenSet(name="easy", task="a", problems=1, samples=3, weight=3.0, first=0)
    second = ChosenSet(name="hard", task="b", problems=1, samples=3, weight=1.0, first=1)
    found = of_sets(6, EPISODES, {first: RewardBounds(), second: RewardBounds(lowest=0.0, highest=2.0)})
    assert [(one.name, one.kind.value, one.accuracy) for one in found] == [
        ("", "greedy", 0.75),
        ("", "sampled", pytest.approx((3 * 2 / 3 + 0) / 4)),
        ("easy", "greedy", 1.0),
        ("easy", "sampled", pytest.approx(2 / 3)),
        ("hard", "greedy", 0.0),
        ("hard", "sampled", 0.0),
    ]
    assert found[0].num_problems == 2 and found[1].num_unscored == 1


class Looks(RunProgress):
    """The progress of a run that changes with each reading: a rollout arrives at each of the first ten readings, and
    the last version is published at the twentieth."""

    def __init__(self) -> None:
        super().__init__(last_version=9, evaluated=())
        self.looks = 0

    @property
    def num_received(self) -> int:
        self.looks += 1
        if self.looks == 20:
            self.published()
        return min(self.looks, 10)

    @num_received.setter
    def num_received(self, number: int) -> None:
        assert number == 0


class Reports(EventQueue):
    def __init__(self, hub: World) -> None:
        super().__init__()
        self._hub = hub

    async def put(self, event: Event) -> None:
        await self._hub.report(event)


class World:
    """The hub's parts for evaluations by nodes, with a coordinator that finishes evaluation requests only if `finishes`
    is True."""

    episodes = EPISODES

    def __init__(self, *, finishes: bool, alone: bool = False, over: bool = True) -> None:
        self.finishes = finishes
        self.said: list[Any] = []
        self.progress = Looks()
        self.live = LiveNodes({} if alone else {"a": LiveNode()})
        if over:
            self.progress.published()
        self.evaluations = NodeEvaluations(
            sets={ONE: RewardBounds()},
            queue=Reports(self),
            publishing=self,
            store=cast(AsyncStore, self),
            progress=self.progress,
            live=self.live,
        )

    async def report(self, event: Event) -> None:
        self.said.append(event)
        if self.finishes and isinstance(event, EvaluationWanted):
            self.evaluations.done(event.policy_version)

    async def keep_for_evaluation(self, policy_version: int) -> None:
        self.said.append(policy_version)

    async def read(self, query: object, policy_version: int) -> list[EvaluatedEpisode]:
        assert query is read_evaluated
        return self.episodes


async def test_a_version_is_published_first_and_measured_when_done() -> None:
    world = World(finishes=True)
    measured = await world.evaluations.measure(6, patience_s=0.0)
    assert measured is not None and [one.policy_version for one in measured] == [6, 6]
    assert world.said == [6, EvaluationWanted(policy_version=6)]
    world.evaluations.done(6)  # A second call must be harmless after the evaluation has ended.


@pytest.mark.parametrize("stored", [None, 1e30, -1.0])
async def test_an_evaluation_without_scores_is_left_to_the_hub(
    stored: float | None,
) -> None:
    """If all scores are missing or out of bounds, the nodes' rollouts give no figures. Scores are final, so waiting
    would not help."""
    world = World(finishes=True)
    world.episodes = [episode(0, stored, greedy=True), episode(1, stored, greedy=True)]
    assert await world.evaluations.measure(6, patience_s=0.0) is None
    world.episodes = [episode(0, stored, greedy=True), episode(1, 1.0, greedy=True)]
    measured = await world.evaluations.measure(6, patience_s=0.0)
    assert measured is not None
    assert [(one.num_unscored, one.accuracy, one.mean_reward) for one in measured] == [(1, 1.0, 1.0)]


@pytest.mark.parametrize(("alone", "over"), [(True, True), (False, True), (True, False)])
async def test_a_finished_run_waits_for_no_node_that_does_nothing(
    alone: bool, over: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(by_nodes, "LOOK_S", 0.001)
    world = World(finishes=False, alone=alone, over=over)
    assert await world.evaluations.measure(6, patience_s=3600.0 if alone else 0.0) is None
    assert world.said[-1] == EvaluationAbandoned(policy_version=6)
    assert world.progress.looks >= (20 if not over else 10), "it waits while rollouts come in and the run goes on"


def test_every_engine_treats_the_greedy_temperature_as_argmax() -> None:
    """Greedy sampling uses a temperature near 0. A logit that is one float32 step below the largest must never be
    chosen; of equal logits, any may be chosen."""
    import torch

    from echo_shared.sampling.torch_draws import draw

    rng = np.random.default_rng(0)
    temperatures = np.full(64, GREEDY_TEMPERATURE)
    for vocabulary in (40, 3_000):
        for scale in (1.0, 40.0, 1e4):
            logits = (rng.normal(size=(64, vocabulary)) * scale).astype(np.float32)
            best = logits.argmax(axis=1)
            second = np.nextafter(logits.max(axis=1), np.float32(-np.inf))
            logits[np.arange(64), (best + 7) % vocabulary] = second
            u = rng.random(64)
            reference = draws.draw(logits, u, GREEDY_TEMPERATURE)
            rows = draw_rows(logits, np.arange(64), u, temperatures)
            tokens, logprobs = draw(*(torch.from_numpy(value) for value in (logits, u, temperatures)))
            for drawn, logprob in (reference, rows, (tokens.numpy(), logprobs.numpy())):
                np.testing.assert_array_equal(drawn, best)
                np.testing.assert_allclose(logprob, 0.0, atol=1e-6)
    tied = np.array([[1.0, 3.0, 2.0, 3.0]], np.float32)
    assert {int(draws.draw(tied, np.array([u]), GREEDY_TEMPERATURE)[0][0]) for u in (0.0, 0.3, 0.7, 0.99)} == {1, 3}


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
async def test_leases_of_that_temperature_give_the_greedy_completions_of_the_base() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from echo_hub.config.sections import HubConfig
    from echo_hub.run.base_files import resolve_base
    from echo_hub.run.base_model import PromptCodec
    from echo_hub.scoring.problems import Problems
    from echo_shared.sampling.interface import GroupRequest
    from echo_shared.sampling.torch_sampler import greedy, sample_groups

    config = HubConfig.model_validate({"evaluation": {"problems": 64}})
    base = resolve_base(config.model.base)
    codec = PromptCodec.of_run(config, base)
    problems = Problems.of_run(config, codec)
    model: Any = await asyncio.to_thread(AutoModelForCausalLM.from_pretrained, base, dtype=torch.float32)
    ids = [EvaluationGroup(policy_version=0, greedy=True, number=number).group_id for number in range(64)]
    prompts = [problems.prompt_ids(group_id) for group_id in ids]
    requests = [
        GroupRequest(
            lease_id=number,
            group_id=group_id,
            indices=(0,),
            prompt_ids=problems.prompt_ids(group_id),
            seed=number,
            policy_version=0,
            temperature=GREEDY_TEMPERATURE,
            max_tokens=config.sampling.max_tokens,
            stop_ids=tuple(codec.stop_ids),
        )
        for number, group_id in enumerate(ids)
    ]
    drawn = {rollout.lease_id: rollout for rollout in sample_groups(model.eval(), requests)}
    expected = greedy(model, prompts, max_tokens=config.sampling.max_tokens, stop_ids=tuple(codec.stop_ids))
    for number, completion in enumerate(expected):
        np.testing.assert_array_equal(drawn[number].completion_ids, completion)
        assert np.isfinite(drawn[number].behavior_logprobs).all()
    assert problems.respond(ids[5], [expected[5]]) == problems.heldout_respond(5, [expected[5]])
