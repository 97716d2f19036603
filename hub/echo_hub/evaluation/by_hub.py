"""Evaluation on held-out problems by the hub's own device, pinned to one policy version.

Every completion of one evaluation comes from exactly the version that it names. The draws of problem n are seeded by
the run's seed and n, never by the version, so versions are compared on the same uniforms.

Who generates is one small interface, `Generator`; who answers, with a reward or with what an environment says to a
turn, is another, `Judge`. In an evaluation by nodes the coordinator does both, as for training
(`echo_hub.evaluation.by_nodes`). What comes of either are attempts (`echo_hub.evaluation.figures`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.config.sections import HubConfig
from echo_hub.core.evaluating import evaluation_seed
from echo_hub.core.leasing import turn_seed
from echo_hub.evaluation.figures import Attempt, summary, with_headline
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.stop_strings import NO_STRINGS, StopStrings
from echo_hub.tasks.rewards import RewardBounds
from echo_shared.books import Evaluation, EvaluationKind
from echo_shared.errors import ScorerError
from echo_shared.messages import FinishReason
from echo_shared.sampling import FinishedRollout, GroupRequest

Ids = NDArray[np.int32]
Played = tuple[int, Sequence[Ids], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """All rollouts of some requests, in any order, and how long the engine was at work on them."""

    rollouts: Sequence[FinishedRollout]
    seconds: float


class Generator(Protocol):
    """The engine that draws. All requests of one call name the same version, and every completion is by exactly that
    one."""

    async def __call__(self, requests: Sequence[GroupRequest], *, greedy: bool) -> Generated: ...


class Judge(Protocol):
    """Gives an answer to each (problem, completions of its turns so far, tokens of what was said to these), in order.

    With the reward of an episode that has ended; with the ids between this completion and the next turn, if it goes on;
    or with the error of a scorer that failed.
    """

    async def __call__(self, played: Sequence[Played]) -> Sequence[float | Ids | ScorerError]: ...


class VersionSampler(Protocol):
    """Draws on the hub's own device: `echo_hub.training.trainer` and `echo_hub.evaluation.evaluator`."""

    async def generate(self, requests: Sequence[GroupRequest], *, adapter: Path | None, greedy: bool) -> Generated:
        """Return all rollouts of `requests`. `adapter`: its directory; None: the bare base."""


def drawn_by(sampler: VersionSampler, adapter: Path | None) -> Generator:
    """A generator of the version that has this adapter."""

    async def generate(requests: Sequence[GroupRequest], *, greedy: bool) -> Generated:
        return await sampler.generate(requests, adapter=adapter, greedy=greedy)

    return generate


def scored_by(pool: ScoringPool) -> Judge:
    """The run's task, in the pool's processes."""

    async def judge(played: Sequence[Played]) -> Sequence[float | Ids | ScorerError]:
        return await pool.rewards("heldout_respond", played)

    return judge


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One evaluation set, and how its problems are asked: `prompts[n]` is problem `first` + n of all sets'."""

    name: str = ""
    first: int = 0
    weight: float = 1.0
    """In the run's own accuracy."""
    prompts: Sequence[Ids]
    run_seed: int
    samples: int
    """Completions of each problem at `temperature`, beside the greedy one; 0 = none."""
    temperature: float
    max_tokens: int
    """Most tokens of one turn's completion."""
    stop_ids: tuple[int, ...]
    rewards: RewardBounds
    stop_strings: StopStrings = NO_STRINGS

    @classmethod
    def of_run(cls, config: HubConfig, problems: Problems, *, stop_ids: tuple[int, ...]) -> tuple[HeldOut, ...]:
        """The evaluation sets of a run by its settings. Samples their problems: off the event loop."""
        return tuple(
            cls(
                name=chosen.name,
                first=chosen.first,
                weight=chosen.weight,
                prompts=problems.heldout_prompt_ids(chosen),
                run_seed=config.run.seed,
                samples=chosen.samples,
                temperature=config.sampling.temperature,
                max_tokens=config.sampling.max_tokens,
                stop_ids=stop_ids,
                stop_strings=StopStrings.of_run(config, problems.tasks[chosen.task].codec),
                rewards=problems.rewards_of(chosen),
            )
            for chosen in problems.sets
        )


@dataclass(slots=True, kw_only=True, eq=False)
class Episode(Attempt):
    """One episode, while it is played and when it has ended."""

    index: int
    prompt_ids: Ids
    """The next turn's prompt: the whole conversation so far."""
    turns: list[Ids] = field(default_factory=list)
    observations: list[Ids] = field(default_factory=list)
    """What each turn but the last was answered: the ids between it and the next one."""
    error: str = ""
    """What the scorer failed with, where there is no reward."""

    @property
    def observed_tokens(self) -> int:
        """Tokens of all observations."""
        return sum(map(len, self.observations))

    def take(self, rollout: FinishedRollout) -> None:
        self.turns.append(rollout.completion_ids)
        self.num_tokens += len(rollout.completion_ids)
        self.truncated |= rollout.finish_reason is FinishReason.LENGTH

    def go_on(self, observation_ids: Ids) -> None:
        self.prompt_ids = np.concatenate([self.prompt_ids, self.turns[-1], observation_ids])
        self.observations.append(observation_ids)


Watch = Callable[[HeldOut, EvaluationKind, Sequence[Episode]], None]
"""Is given the episodes of an evaluation set, of one kind, when all of them have ended."""


def _unwatched(_heldout: HeldOut, _kind: EvaluationKind, _episodes: Sequence[Episode]) -> None:
    pass


async def evaluate_sets(
    policy_version: int,
    sets: Sequence[HeldOut],
    *,
    generate: Generator,
    judge: Judge,
    watch: Watch = _unwatched,
) -> list[Evaluation]:
    """Measures every set, one after the other: the run's own figures first, where there are several. Raises as
    `evaluate`."""
    measured: list[Evaluation] = []
    for heldout in sets:
        measured += await evaluate(policy_version, heldout, generate=generate, judge=judge, watch=watch)
    return with_headline(measured, {heldout.name: heldout.weight for heldout in sets})


async def evaluate(
    policy_version: int, heldout: HeldOut, *, generate: Generator, judge: Judge, watch: Watch = _unwatched
) -> list[Evaluation]:
    """Measures every kind that is asked for, greedy first. Raises ScorerError when not one completion could be
    scored."""
    results = []
    for kind, samples in ((EvaluationKind.GREEDY, 1), (EvaluationKind.SAMPLED, heldout.samples)):
        if samples:
            episodes, seconds = await play(policy_version, heldout, kind, generate=generate, judge=judge)
            watch(heldout, kind, episodes)
            measured = summary(
                episodes,
                policy_version,
                kind,
                samples=samples,
                seconds=seconds,
                rewards=heldout.rewards,
                name=heldout.name,
            )
            results.append(measured)
    return results


async def play(
    policy_version: int, heldout: HeldOut, kind: EvaluationKind, *, generate: Generator, judge: Judge
) -> tuple[list[Episode], float]:
    """All episodes of one kind, played to their end, and the seconds that the engine worked."""
    samples = 1 if kind is EvaluationKind.GREEDY else heldout.samples
    episodes = [
        Episode(number=number, index=index, prompt_ids=prompt)
        for number, prompt in enumerate(heldout.prompts, heldout.first)
        for index in range(samples)
    ]
    return episodes, await _play(episodes, policy_version, kind, heldout, generate=generate, judge=judge)


async def _play(
    episodes: Sequence[Episode],
    policy_version: int,
    kind: EvaluationKind,
    heldout: HeldOut,
    *,
    generate: Generator,
    judge: Judge,
) -> float:
    """Plays all episodes to their end, turn by turn; returns the seconds that the engine worked."""
    seconds, turn, playing = 0.0, 0, list(episodes)
    while playing:
        requests, who = _requests(playing, policy_version, heldout, turn)
        generated = await generate(requests, greedy=kind is EvaluationKind.GREEDY)
        seconds += generated.seconds
        for rollout in generated.rollouts:
            who[rollout.lease_id, rollout.index].take(heldout.stop_strings.finished(rollout))
        answers = await judge([(episode.number, episode.turns, episode.observed_tokens) for episode in playing])
        going_on = []
        for episode, answer in zip(playing, answers, strict=True):
            if isinstance(answer, np.ndarray):
                episode.go_on(answer)
                going_on.append(episode)
            elif isinstance(answer, ScorerError):
                episode.error = answer.brief
            else:
                episode.reward = answer
        playing, turn = going_on, turn + 1
    return seconds


def _requests(
    playing: Sequence[Episode], policy_version: int, heldout: HeldOut, turn: int
) -> tuple[list[GroupRequest], dict[tuple[int, int], Episode]]:
    """One request a problem in the first turn, where all share its prompt, then one an episode; whose each draw is."""
    together: dict[tuple[int, int], list[Episode]] = {}
    for episode in playing:
        together.setdefault((episode.number, episode.index if turn else 0), []).append(episode)
    requests = [
        GroupRequest(
            lease_id=lease_id,
            group_id=number,
            indices=tuple(episode.index for episode in episodes),
            prompt_ids=episodes[0].prompt_ids,
            seed=turn_seed(evaluation_seed(heldout.run_seed, number), turn),
            policy_version=policy_version,
            temperature=heldout.temperature,
            max_tokens=heldout.max_tokens,
            stop_ids=heldout.stop_ids,
        )
        for lease_id, ((number, _), episodes) in enumerate(together.items())
    ]
    who = {
        (lease_id, episode.index): episode
        for lease_id, episodes in enumerate(together.values())
        for episode in episodes
    }
    return requests, who
