"""Sample the base model's answers to a task's problems before training, and judge if GRPO can learn from them.

Each problem is answered by one group, as in training: `training.group_size` completions with the run's sampling
settings. A group gives a training signal only if its rewards differ, so the verdict depends on the share of such
groups. The solve rate explains a low share: at 0 % there is nothing to reinforce, at 100 % nothing to learn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from echo_hub.config.sections import HubConfig
from echo_hub.evaluation.by_hub import AnswerScorer, Episode, EpisodeJudge, Generator, HeldOut, Ids, Played, play
from echo_hub.evaluation.examples import transcript
from echo_hub.evaluation.figures import standard_error
from echo_hub.evaluation.turns_in_words import TurnInWords, turns_in_words
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.restating import restated
from echo_hub.scoring.stop_strings import StopStrings
from echo_hub.scoring.task_problems import EnvironmentReply
from echo_hub.tasks.rewards import SCORE, RewardBounds
from echo_shared.errors import ScorerError
from echo_shared.records.rewards import all_equal, components_of
from echo_shared.records.run import EvaluationKind

GOOD: Final = (0.05, 0.6)
"""Lowest and highest solve rate with which GRPO learns well."""
MANY_ALIKE: Final = 0.8
"""Share of groups with equal rewards from which on a warning is given: such groups train nothing."""
MANY_CUT: Final = 0.2
MANY_MISFORMED: Final = 0.05
"""Smallest share of completions that leads to a warning: for completions cut at the length limit (`MANY_CUT`), and for
right answers in a form that earns nothing (`MANY_MISFORMED`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseAnswer:
    text: str
    num_tokens: int
    reward: float | None
    """Reward of the answer; None if the scorer failed, and `error` then says why."""
    is_solved: bool
    is_cut: bool
    """True if the completion was cut off at sampling.max_tokens."""
    error: str = ""
    paid_as: str = ""
    """Text of this answer in another form that would count as solved, such as the bare number. "" if the completion
    itself is solved, or if all tried forms fail."""
    turns: tuple[TurnInWords, ...] = ()
    """The episode turn by turn; () if the task has a single turn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredProblem:
    """A problem with the answers of its group."""

    prompt: str
    """The prompt as the task states it."""
    rendered: str
    """The prompt as the base model receives it, with the run's texts and in the chat template."""
    reference: str | None
    answers: tuple[BaseAnswer, ...]
    is_mixed: bool
    """True if the rewards of the answers differ, so that the group gives a training signal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseAnswers:
    """All groups, their figures, and the verdict on them."""

    task: str
    base: str
    group_size: int
    problems: tuple[AnsweredProblem, ...]
    num_scored: int
    """Number of completions that have a reward."""
    num_solved: int
    solved_rate: float
    solved_error: float
    """Standard error of `solved_rate`, over problems."""
    mean_reward: float
    num_mixed: int
    seconds: float
    """Seconds that the engine (the program that runs the model) spent on sampling."""
    verdict: str
    """A sentence that says if GRPO has a training signal."""
    warnings: tuple[str, ...]


async def base_answers(
    config: HubConfig,
    problems: Problems,
    *,
    pool: ScoringPool,
    judge: AnswerScorer | EpisodeJudge,
    generate: Generator,
    count: int,
) -> BaseAnswers:
    """Let the base model answer the first `count` problems of a run's only task. `generate` samples its completions,
    and `judge` scores them: `trial_judge(pool)`, unless the task has sessions.

    Raises ScorerError if no completion can be scored.
    """
    task = problems.tasks[""]
    asked = await training_problems(config, problems, count=count, samples=config.training.group_size)
    episodes, seconds = await play(0, asked, EvaluationKind.SAMPLED, generate=generate, judge=judge)
    paid_as = {} if problems.multi_turn else await _paid_as(episodes, task.codec, task.weighing.of_score, pool)
    answered = tuple(
        _problem(problems, number, [one for one in episodes if one.number == number], paid_as)
        for number in range(count)
    )
    return _figures(config, answered, seconds)


async def training_problems(config: HubConfig, problems: Problems, *, count: int, samples: int) -> HeldOut:
    """Return the first `count` training problems of a run's only task, in the form of an evaluation set."""
    task = problems.tasks[""]
    return HeldOut(
        prompts=await asyncio.to_thread(lambda: [problems.prompt_ids(number) for number in range(count)]),
        run_seed=config.run.seed,
        samples=samples,
        temperature=config.sampling.temperature,
        max_tokens=config.sampling.max_tokens,
        stop_ids=task.codec.stop_ids,
        stop_strings=StopStrings.of_run(config, task.codec),
        rewards=task.rewards,
        of_training=True,
    )


def trial_judge(pool: ScoringPool) -> AnswerScorer:
    """Return a scorer of training problems for a task that is tried without a run. It also tells the reward of each
    turn."""

    async def judge(played: Sequence[Played]) -> Sequence[float | Ids | EnvironmentReply | ScorerError]:
        answers = await pool.rewards("respond", played)
        return [EnvironmentReply(*answer) if isinstance(answer, Sequence) else answer for answer in answers]

    return judge


async def _paid_as(
    episodes: Sequence[Episode], codec: PromptCodec, of_score: RewardBounds, pool: ScoringPool
) -> dict[tuple[int, int], str]:
    """Return, for unsolved answers, a rewritten form that would count as solved, such as the number alone. Keys:
    problem number and index of the answer."""
    forms = [
        (episode, form)
        for episode in episodes
        if episode.reward is not None and not of_score.is_solved(_score(episode.reward))
        for form in restated(codec.reply(episode.turns[-1]))
    ]
    scores = await pool.call("training_score", [(episode.number, form) for episode, form in forms])
    found: dict[tuple[int, int], str] = {}
    for (episode, form), score in zip(forms, scores, strict=True):
        if isinstance(score, float) and of_score.is_solved(score):
            found.setdefault((episode.number, episode.index), form)
    return found


def _score(reward: float) -> float:
    return (components_of(reward) or {}).get(SCORE, reward)


def _problem(
    problems: Problems, number: int, episodes: Sequence[Episode], paid_as: Mapping[tuple[int, int], str]
) -> AnsweredProblem:
    problem, codec, bounds = problems.training_problem(number), problems.codec, problems.tasks[""].rewards
    reference = problem.metadata.get("answer")
    rewards = [episode.reward for episode in episodes if episode.reward is not None]
    return AnsweredProblem(
        prompt=problem.prompt,
        rendered=codec.render_prompt(problem.prompt),
        reference=None if reference is None else str(reference),
        answers=tuple(
            BaseAnswer(
                text=transcript(episode, codec),
                num_tokens=episode.num_tokens,
                reward=episode.reward,
                is_solved=episode.reward is not None and bounds.is_solved(episode.reward),
                is_cut=episode.truncated,
                error=episode.error,
                paid_as=paid_as.get((episode.number, episode.index), ""),
                turns=turns_in_words(episode, codec) if problems.multi_turn else (),
            )
            for episode in episodes
        ),
        is_mixed=not all_equal(rewards),
    )


def _figures(config: HubConfig, answered: tuple[AnsweredProblem, ...], seconds: float) -> BaseAnswers:
    scored = [[answer for answer in problem.answers if answer.reward is not None] for problem in answered]
    every = [answer for answers in scored for answer in answers]
    if not every:
        errors = [answer.error for problem in answered for answer in problem.answers]
        raise ScorerError(
            "None of the base model's answers could be scored.",
            got=f"{len(errors)} completions; the first: {errors[0]}",
            do="Fix the task's scorer: echo-hub try-task without --sample shows what it does.",
        )
    rates = [float(np.mean([answer.is_solved for answer in answers])) for answers in scored if answers]
    num_mixed = sum(problem.is_mixed for problem in answered)
    rate = float(np.mean(rates))
    return BaseAnswers(
        task=config.task.label,
        base=config.model.base,
        group_size=config.training.group_size,
        problems=answered,
        num_scored=len(every),
        num_solved=sum(answer.is_solved for answer in every),
        solved_rate=rate,
        solved_error=standard_error(rates),
        mean_reward=float(np.mean([answer.reward for answer in every])),
        num_mixed=num_mixed,
        seconds=seconds,
        verdict=verdict(rate, num_mixed / len(answered), num_scored=len(every)),
        warnings=tuple(_warnings(config, answered, every)),
    )


def verdict(solved_rate: float, mixed_share: float, *, num_scored: int) -> str:
    """Return a sentence that judges the training signal for GRPO, and suggests changes if the signal is weak."""
    if solved_rate >= 1 - 1e-9:
        return "Nothing to learn: the base solves all of it. Make the problems harder."
    if mixed_share == 0 and solved_rate == 0:
        return (
            f"Nothing to reinforce: none of {num_scored} completions is solved, and no group has differing rewards. "
            f"A solve rate below {min(1.0, 3 / num_scored):.1%} would look the same. Make the problems easier, "
            "describe the answer's form in the prompt, or begin with demonstrations: echo-hub sft."
        )
    if mixed_share == 0:
        return (
            "No training signal: every group is solved either completely or not at all. "
            "Raise training.group_size or sampling.temperature."
        )
    if mixed_share <= 1 - MANY_ALIKE:
        rare = solved_rate < GOOD[0]
        why = "few are solved" if rare else "most are solved" if solved_rate > GOOD[1] else "groups agree"
        do = "Easier" if rare else "Harder" if solved_rate > GOOD[1] else "Other"
        return (
            f"Little training signal: {why}, and {1 - mixed_share:.0%} of the groups have equal rewards. {do} "
            "problems, or a larger training.group_size, would waste less."
        )
    if solved_rate > GOOD[1]:
        return (
            "Some training signal, but little is left to learn: the base solves most problems. Harder problems last "
            "longer."
        )
    if solved_rate < GOOD[0]:
        return (
            f"Some training signal: few completions are solved, but rewards differ within {mixed_share:.0%} of the "
            "groups, and GRPO learns from these."
        )
    return f"Good training signal: rewards differ within {mixed_share:.0%} of the groups."


def _warnings(config: HubConfig, answered: Sequence[AnsweredProblem], every: Sequence[BaseAnswer]) -> list[str]:
    found = []
    misformed = [answer for answer in every if answer.paid_as]
    if len(misformed) > MANY_MISFORMED * len(every):
        found.append(
            f"{len(misformed)} of {len(every)} completions contain the right answer in a form that is not rewarded: "
            f'one would be solved as "{misformed[0].paid_as}". Describe in task.system_prompt or task.prompt_suffix '
            "the form of the answer, or extract the answer from the text in the scorer."
        )
    cut = sum(answer.is_cut for answer in every)
    if cut > MANY_CUT * len(every):
        found.append(
            f"{cut} of {len(every)} completions were cut off at sampling.max_tokens = {config.sampling.max_tokens}, "
            "before the model had ended: raise it, or ask for shorter answers."
        )
    failed = [answer for problem in answered for answer in problem.answers if answer.reward is None]
    if failed:
        found.append(f"The scorer failed on {len(failed)} completions; the first error: {failed[0].error}")
    if config.model.start_from:
        found.append(f"These are the base's answers: the run itself starts from {config.model.start_from}.")
    return found
