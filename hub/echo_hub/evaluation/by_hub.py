"""Evaluate one policy version on held-out problems, on the hub's own device.

Every completion of an evaluation is drawn with exactly the named version. The draws of problem n are seeded by the
run's seed and n, never by the version, so that all versions are compared on the same random numbers.

There are two small interfaces: a `Generator` samples completions; an `AnswerScorer` answers each completion with a
reward or with an environment's reply. For evaluations on nodes, the coordinator leases and collects the completions
instead (`echo_hub.evaluation.by_nodes`). Both kinds of evaluation produce attempts (`echo_hub.evaluation.figures`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.groups import turn_seed
from echo_hub.core.evaluating import evaluation_seed
from echo_hub.evaluation.figures import Attempt, summary, with_headline
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.stop_strings import NO_STRINGS, StopStrings
from echo_hub.tasks.rewards import RewardBounds
from echo_shared.errors import ScorerError
from echo_shared.records.run import Evaluation, EvaluationKind
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.wire.messages import FinishReason

Ids = NDArray[np.int32]
Played = tuple[int, Sequence[Ids], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """Rollouts of requests, in any order, with the engine's sampling time in seconds."""

    rollouts: Sequence[FinishedRollout]
    seconds: float


class Generator(Protocol):
    """The engine that samples. All requests of one call name the same version; every completion is drawn with it."""

    async def __call__(self, requests: Sequence[GroupRequest], *, greedy: bool) -> Generated: ...


class AnswerScorer(Protocol):
    """Answers each item of `played` (problem number, completions of the episode's turns so far, number of tokens that
    the environment has added between them), in order.

    An answer is the reward of a finished episode, the token ids between this completion and the next turn, or the
    scorer's error.
    """

    async def __call__(self, played: Sequence[Played]) -> Sequence[float | Ids | ScorerError]: ...


class VersionSampler(Protocol):
    """Sampler on the hub's own device or in its Ray cluster. Implemented by `echo_hub.training.trainer` and
    `echo_hub.evaluation.evaluator`."""

    async def generate(self, requests: Sequence[GroupRequest], *, adapter: Path | None, greedy: bool) -> Generated:
        """Return all rollouts of `requests`. `adapter`: the adapter's directory; None: the bare base model."""


def drawn_by(sampler: VersionSampler, adapter: Path | None) -> Generator:
    async def generate(requests: Sequence[GroupRequest], *, greedy: bool) -> Generated:
        return await sampler.generate(requests, adapter=adapter, greedy=greedy)

    return generate


def scored_by(pool: ScoringPool) -> AnswerScorer:
    """Return a scorer that uses the run's task in the processes of `pool`."""

    async def judge(played: Sequence[Played]) -> Sequence[float | Ids | ScorerError]:
        return await pool.rewards("heldout_respond", played)

    return judge


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """An evaluation set with its sampling parameters. `prompts[n]` is the prompt of problem number `first` + n; the
    numbers count through all sets."""

    name: str = ""
    first: int = 0
    weight: float = 1.0
    """Weight of this set in the run's own accuracy, which is a mean over all sets."""
    prompts: Sequence[Ids]
    run_seed: int
    samples: int
    """Number of completions of each problem at `temperature`, in addition to the greedy one; 0 = only the greedy
    one."""
    temperature: float
    max_tokens: int
    """Maximum number of tokens of a completion (one turn)."""
    stop_ids: tuple[int, ...]
    rewards: RewardBounds
    stop_strings: StopStrings = NO_STRINGS

    @classmethod
    def of_run(cls, config: HubConfig, problems: Problems, *, stop_ids: tuple[int, ...]) -> tuple[HeldOut, ...]:
        """Return the run's evaluation sets. Blocks: it samples their problems."""
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
    """An episode on a held-out problem, running or finished."""

    index: int
    prompt_ids: Ids
    """Prompt of the next turn: the whole conversation so far."""
    turns: list[Ids] = field(default_factory=list)
    observations: list[Ids] = field(default_factory=list)
    """The environment's reply to each turn except the last: the token ids between this turn and the next."""
    error: str = ""
    """The scorer's error if there is no reward; else ""."""

    @property
    def observed_tokens(self) -> int:
        return sum(map(len, self.observations))

    def take(self, rollout: FinishedRollout) -> None:
        self.turns.append(rollout.completion_ids)
        self.num_tokens += len(rollout.completion_ids)
        self.truncated |= rollout.finish_reason is FinishReason.LENGTH

    def go_on(self, observation_ids: Ids) -> None:
        self.prompt_ids = np.concatenate([self.prompt_ids, self.turns[-1], observation_ids])
        self.observations.append(observation_ids)


Watch = Callable[[HeldOut, EvaluationKind, Sequence[Episode]], None]
"""Called with the finished episodes of one evaluation set and kind."""


async def evaluate_sets(
    policy_version: int,
    sets: Sequence[HeldOut],
    *,
    generate: Generator,
    judge: AnswerScorer,
    watches: Sequence[Watch] = (),
) -> list[Evaluation]:
    """Evaluate every set, one after the other. If there are several, the run's own figures over all sets come first.
    Raises the errors of `evaluate`."""
    measured: list[Evaluation] = []
    for heldout in sets:
        measured += await evaluate(policy_version, heldout, generate=generate, judge=judge, watches=watches)
    return with_headline(measured, {heldout.name: heldout.weight for heldout in sets})


async def evaluate(
    policy_version: int,
    heldout: HeldOut,
    *,
    generate: Generator,
    judge: AnswerScorer,
    watches: Sequence[Watch] = (),
) -> list[Evaluation]:
    """Evaluate a set greedily, and by sampling if it has samples. Raises ScorerError if no completion could be
    scored."""
    results = []
    for kind, samples in ((EvaluationKind.GREEDY, 1), (EvaluationKind.SAMPLED, heldout.samples)):
        if samples:
            episodes, seconds = await play(policy_version, heldout, kind, generate=generate, judge=judge)
            for watch in watches:
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
    policy_version: int, heldout: HeldOut, kind: EvaluationKind, *, generate: Generator, judge: AnswerScorer
) -> tuple[list[Episode], float]:
    """Run all episodes of one kind to their end. Return them, and the seconds that the engine sampled."""
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
    judge: AnswerScorer,
) -> float:
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
    """Return the requests of one turn, and the episode of each requested rollout, by (lease id, index).

    In the first turn all episodes of a problem have the same prompt and share a request; later each episode has its
    own.
    """
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
