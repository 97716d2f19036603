"""Evaluate one policy version on held-out problems, on the hub's own device.

Every completion of an evaluation is drawn with exactly the named version. The draws of problem n are seeded by the
run's seed and n, never by the version, so that all versions are compared on the same random numbers.

There are three small interfaces. A `Generator` samples completions. An `AnswerScorer` answers each completion with a
reward or with an environment's reply. An `EpisodeJudge` answers episodes whose environment is a session, in any order.

For evaluations on nodes, the coordinator leases and collects the completions instead (`echo_hub.evaluation.by_nodes`).
Both kinds of evaluation produce attempts (`echo_hub.evaluation.figures`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Final, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.groups import turn_seed
from echo_hub.core.evaluating import evaluation_seed
from echo_hub.core.evaluation_groups import EvaluationGroup
from echo_hub.evaluation.figures import Attempt, summary, with_headline
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.stop_strings import NO_STRINGS, StopStrings
from echo_hub.scoring.task_problems import EnvironmentReply
from echo_hub.tasks.rewards import RewardBounds
from echo_shared.errors import ScorerError
from echo_shared.records.run import Evaluation, EvaluationKind
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.wire.messages import FinishReason

Ids = NDArray[np.int32]


class Played(NamedTuple):
    """What an `AnswerScorer` is told about an episode whose newest turn it must answer."""

    number: int
    """Number of the problem."""
    turns: Sequence[Ids]
    """Completions of all turns so far."""
    observed_tokens: int
    """Number of tokens that the environment has added between the turns."""


class Again(Enum):
    """An `EpisodeJudge` answers this if the episode must restart from its prompt, because its session was lost."""

    AGAIN = 1


AGAIN: Final = Again.AGAIN
Answer = float | Ids | EnvironmentReply | ScorerError | Literal[Again.AGAIN]


@dataclass(frozen=True, slots=True, kw_only=True)
class Generated:
    """The rollouts that answer a generator's requests, in any order, and the engine's sampling time in seconds."""

    rollouts: Sequence[FinishedRollout]
    seconds: float


class Generator(Protocol):
    """The engine that samples. All requests of one call name the same version, and this version draws every
    completion."""

    async def __call__(self, requests: Sequence[GroupRequest], *, greedy: bool) -> Generated: ...


class AnswerScorer(Protocol):
    """Answers each item of `played`, in order.

    An answer is the reward of a finished episode, the token ids between this completion and the next turn (alone, or
    with the turn's reward), or the scorer's error.
    """

    async def __call__(self, played: Sequence[Played]) -> Sequence[float | Ids | EnvironmentReply | ScorerError]: ...


@runtime_checkable
class EpisodeJudge(Protocol):
    """Answers episodes in any order. Its implementation for tasks with sessions is
    `echo_hub.evaluation.by_sessions`."""

    async def answers(self, drawn: Sequence[Episode]) -> list[tuple[Episode, Answer]]:
        """Take episodes whose newest turn was just sampled. Return at least one episode that is answered now. The other
        episodes, also those of earlier calls, are returned by later calls."""

    async def close(self) -> None:
        """Give up all episodes that have no answer yet."""


class VersionSampler(Protocol):
    """Sampler on the hub's own device or in its Ray cluster. Implemented by `echo_hub.training.trainer` and
    `echo_hub.evaluation.evaluator`."""

    async def generate(self, requests: Sequence[GroupRequest], *, adapter: Path | None, greedy: bool) -> Generated:
        """Return all rollouts of `requests`. `adapter` is the directory of the version's adapter; None stands for the
        base model without an adapter."""


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
    """An evaluation set with its sampling parameters. `prompts[n]` is the prompt of problem number `first` + n; problem
    numbers are consecutive over all sets."""

    name: str = ""
    first: int = 0
    weight: float = 1.0
    """Weight of this set in the run's accuracy, the weighted mean over all sets."""
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
    of_training: bool = False
    """True if `first` counts training problems instead of held-out problems."""

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
    group_id: int = 0
    """Group id of the episode: the id that evaluations by nodes use for this problem and kind. The id names the
    episode's session."""
    prompt_ids: Ids
    """Prompt of the next turn: the whole conversation so far."""
    turns: list[Ids] = field(default_factory=list)
    observations: list[Ids] = field(default_factory=list)
    """The environment's reply to each turn except the last: the token ids between this turn and the next."""
    turn_rewards: list[float] = field(default_factory=list)
    """Reward of each turn except the last; 0 where the scorer does not tell it."""
    rollouts: list[FinishedRollout] = field(default_factory=list)
    """The turns as the engine returned them."""
    attempt: int = 0
    """Number of times that the episode was restarted because its session was lost."""
    losses: int = 0
    """Number of lost sessions. The episode ends when there are too many."""
    error: str = ""
    """The scorer's error; "" if the scorer has not failed."""

    @property
    def observed_tokens(self) -> int:
        return sum(map(len, self.observations))

    def take(self, rollout: FinishedRollout) -> None:
        self.rollouts.append(rollout)
        self.turns.append(rollout.completion_ids)
        self.num_tokens += len(rollout.completion_ids)
        self.truncated |= rollout.finish_reason is FinishReason.LENGTH

    def go_on(self, observation_ids: Ids, turn_reward: float = 0.0) -> None:
        self.prompt_ids = np.concatenate([self.prompt_ids, self.turns[-1], observation_ids])
        self.observations.append(observation_ids)
        self.turn_rewards.append(turn_reward)

    def cut_behind(self, turn: int) -> None:
        """Drop the environment's answer to turn `turn`, and all later turns. This is needed when a rebuilt session
        answers that turn differently."""
        kept, answers, rewards = self.rollouts[: turn + 1], self.observations[:turn], self.turn_rewards[:turn]
        self._begin_again()
        for place, rollout in enumerate(kept):
            self.take(rollout)
            if place < turn:
                self.go_on(answers[place], rewards[place])

    def begin_again(self) -> None:
        """Restart the episode from its prompt, because the session was lost."""
        self.attempt += 1
        self._begin_again()

    def _begin_again(self) -> None:
        added = sum(map(len, self.turns[: len(self.observations)])) + self.observed_tokens
        self.prompt_ids = self.prompt_ids[: len(self.prompt_ids) - added]
        self.rollouts, self.turns, self.observations, self.turn_rewards = [], [], [], []
        self.num_tokens, self.truncated = 0, False


class EpisodeWatcher(Protocol):
    """Collects data about the episodes of an evaluation."""

    def finished(self, heldout: HeldOut, kind: EvaluationKind, episodes: Sequence[Episode]) -> None:
        """Take the finished episodes of one evaluation set and kind."""


async def evaluate_sets(
    policy_version: int,
    sets: Sequence[HeldOut],
    *,
    generate: Generator,
    judge: AnswerScorer | EpisodeJudge,
    watches: Sequence[EpisodeWatcher] = (),
) -> list[Evaluation]:
    """Evaluate every set, one after the other. If there are several sets, the run's own figures, over all sets, come
    first. Raises the errors of `evaluate`."""
    measured: list[Evaluation] = []
    for heldout in sets:
        measured += await evaluate(policy_version, heldout, generate=generate, judge=judge, watches=watches)
    return with_headline(measured, {heldout.name: heldout.weight for heldout in sets})


async def evaluate(
    policy_version: int,
    heldout: HeldOut,
    *,
    generate: Generator,
    judge: AnswerScorer | EpisodeJudge,
    watches: Sequence[EpisodeWatcher] = (),
) -> list[Evaluation]:
    """Evaluate a set with greedy sampling, and also with random sampling if `heldout.samples` is not 0. Raises
    ScorerError if no completion could be scored."""
    results = []
    for kind, samples in ((EvaluationKind.GREEDY, 1), (EvaluationKind.SAMPLED, heldout.samples)):
        if samples:
            episodes, seconds = await play(policy_version, heldout, kind, generate=generate, judge=judge)
            for watch in watches:
                watch.finished(heldout, kind, episodes)
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
    policy_version: int,
    heldout: HeldOut,
    kind: EvaluationKind,
    *,
    generate: Generator,
    judge: AnswerScorer | EpisodeJudge,
) -> tuple[list[Episode], float]:
    """Play all episodes of one kind to their end. Return the episodes, and the engine's sampling time in seconds."""
    episodes = episodes_of(heldout, kind, policy_version)
    return episodes, await play_all(episodes, policy_version, kind, heldout, generate=generate, judge=judge)


def episodes_of(heldout: HeldOut, kind: EvaluationKind, policy_version: int = 0) -> list[Episode]:
    """Return new episodes of one kind, one for each completion that the evaluation needs."""
    is_greedy = kind is EvaluationKind.GREEDY
    return [
        Episode(
            number=number,
            index=index,
            group_id=number
            if heldout.of_training
            else EvaluationGroup(policy_version=policy_version, greedy=is_greedy, number=number).group_id,
            prompt_ids=prompt,
        )
        for number, prompt in enumerate(heldout.prompts, heldout.first)
        for index in range(1 if is_greedy else heldout.samples)
    ]


async def play_all(
    episodes: Sequence[Episode],
    policy_version: int,
    kind: EvaluationKind,
    heldout: HeldOut,
    *,
    generate: Generator,
    judge: AnswerScorer | EpisodeJudge,
) -> float:
    """Play these episodes to their end. Return the engine's sampling time in seconds. If `generate` raises an error,
    the episodes keep the turns that were already played."""
    asked = judge if isinstance(judge, EpisodeJudge) else _InOrder(judge)
    seconds, playing, num_open = 0.0, list(episodes), len(episodes)
    try:
        while num_open:
            if playing:
                requests, who = _requests(playing, policy_version, heldout)
                generated = await generate(requests, greedy=kind is EvaluationKind.GREEDY)
                seconds += generated.seconds
                for rollout in generated.rollouts:
                    who[rollout.lease_id, rollout.index].take(heldout.stop_strings.finished(rollout))
            answered = await asked.answers(playing)
            playing = [episode for episode, answer in answered if _goes_on(episode, answer)]
            num_open -= len(answered) - len(playing)
    finally:
        await asked.close()
    return seconds


def _goes_on(episode: Episode, answer: Answer) -> bool:
    """Store an answer in its episode. Return True if the episode has another turn."""
    if isinstance(answer, EnvironmentReply):
        episode.go_on(*answer)
    elif isinstance(answer, np.ndarray):
        episode.go_on(answer)
    elif isinstance(answer, ScorerError):
        episode.error = answer.brief
        return False
    elif not isinstance(answer, Again):
        episode.reward = answer
        return False
    return True


class _InOrder:
    """An `EpisodeJudge` that answers all episodes of a call at once, in order, by an `AnswerScorer`."""

    def __init__(self, judge: AnswerScorer) -> None:
        self._judge = judge

    async def answers(self, drawn: Sequence[Episode]) -> list[tuple[Episode, Answer]]:
        return list(zip(drawn, await self._judge([played(episode) for episode in drawn]), strict=True))

    async def close(self) -> None:
        """Do nothing: no episode is without an answer."""


def played(episode: Episode) -> Played:
    return Played(episode.number, episode.turns, episode.observed_tokens)


def _requests(
    playing: Sequence[Episode], policy_version: int, heldout: HeldOut
) -> tuple[list[GroupRequest], dict[tuple[int, int], Episode]]:
    """Return the requests of each episode's next turn, and the episode of each requested rollout, by (lease id, index).

    In the first turn all episodes of a problem have the same prompt and share a request; later each episode has its
    own.
    """
    together: dict[tuple[int, int], list[Episode]] = {}
    for episode in playing:
        together.setdefault((episode.number, episode.index + 1 if episode.turns else 0), []).append(episode)
    requests = [
        GroupRequest(
            lease_id=lease_id,
            group_id=number,
            indices=tuple(episode.index for episode in episodes),
            prompt_ids=episodes[0].prompt_ids,
            seed=turn_seed(evaluation_seed(heldout.run_seed, number), len(episodes[0].turns)),
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
