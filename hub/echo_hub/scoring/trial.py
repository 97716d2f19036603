"""Trial of a task: score several answers to each of a few problems. A sound task rewards few of these answers.

Problems are sampled in this process, as in a hub, and scored in scoring processes with the run's limits. Each problem
gets these answers:

    empty      no text
    copied     the prompt
    line       one of the prompt's lines, without its list mark, if the prompt has several
    random     the reference answer with every letter and digit replaced, or a few random words
    another    the reference answer of the next problem
    reference  the reference answer: `answer` in a problem's metadata
    tagged     the reference answer inside <answer>...</answer>

An environment gets the same answer in every turn, until it ends the episode.
"""

from __future__ import annotations

import random
import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from echo_hub.config.sections import HubConfig
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.weighing import Weighing
from echo_hub.tasks.rewards import RewardBounds
from echo_shared.errors import ScorerError
from echo_shared.records.rewards import components_of
from echo_shared.sampling.draws import derive_seed

AnswerKind = Literal["empty", "copied", "line", "random", "another", "reference", "tagged"]
FREE: Final[tuple[AnswerKind, ...]] = ("empty", "copied", "line", "random")
"""Kinds of answers that need no work and should earn no reward."""
MOST_TURNS: Final = 64
"""Number of turns after which an episode counts as endless."""
_RANDOM_WORDS: Final = 4
_LIST_MARK: Final = re.compile(r"^\s*\.?(\d{1,3}[.)]|[-*•])\s+")


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedAnswer:
    kind: AnswerKind
    text: str
    reward: float | None = None
    """Reward of the answer; None if there is none because of `error`."""
    error: str = ""
    turns: int = 1
    verdict: str = ""
    """The task's verdict on the answer, in words; "" if the task gives none."""
    components: Mapping[str, float] | None = None
    """Components of the reward before weighing; None if the reward is only the task's score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TriedProblem:
    seed: int
    prompt: str
    """The prompt as the task gives it."""
    rendered: str
    """The prompt as the base model sees it: with the run's texts, in the model's chat template."""
    prompt_tokens: int
    reference: str | None
    reading: str
    """The type as which the task parses the reference answer; "" if the task does not tell the type."""
    answers: tuple[TriedAnswer, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The result of trying a task: its problems with their answers. `warnings` are sentences about likely faults of the
    task."""

    task: str
    base: str
    bounds: RewardBounds
    problems: tuple[TriedProblem, ...]
    warnings: tuple[str, ...]


class _Observed:
    """Result of a turn that does not end the episode."""


def _ended(answer: Any) -> Any:
    """Return the reward or the error if the answer ends the episode, else an `_Observed`."""
    if not isinstance(answer, Mapping):
        return answer
    return _Observed() if "observation" in answer else answer["reward"]


@dataclass(slots=True)
class _Episode:
    """One trial episode. Every turn gives the same answer. `said` takes the result of a turn and sets `is_over`."""

    seed: int
    answer: TriedAnswer
    is_over: bool = False

    def said(self, answer: object, weighing: Weighing) -> None:
        self.is_over = True
        if isinstance(answer, _Observed):
            if self.answer.turns < MOST_TURNS:
                self.is_over = False
                self.answer = replace(self.answer, turns=self.answer.turns + 1)
            else:
                self.answer = replace(self.answer, error=f"The episode has not ended after {MOST_TURNS} turns.")
        elif isinstance(answer, float | Mapping):
            reward = weighing.total(answer)
            self.answer = replace(self.answer, reward=reward, components=components_of(reward))
        else:
            said = answer.brief if isinstance(answer, ScorerError) else repr(answer)
            self.answer = replace(self.answer, error=said)


async def try_task(
    config: HubConfig, problems: Problems, codec: PromptCodec, *, pool: ScoringPool, count: int
) -> Trial:
    """Try `count` problems of a run's only task. `problems` are those with which `pool` was opened, without held-out
    problems.

    Raises ScorerError if a problem cannot be sampled, or if no scoring process can be started.
    """
    seeds = [derive_seed(config.task.name, config.run.seed, "trial", number) for number in range(count)]
    here = [_sample(problems, seed) for seed in seeds]
    there = await pool.call("trial_problem", [(seed,) for seed in seeds])
    for answer in there:
        if isinstance(answer, ScorerError):
            raise answer
    references = [found["answer"] for found in here]
    episodes = [
        _Episode(seed, TriedAnswer(kind=kind, text=text))
        for number, (seed, found) in enumerate(zip(seeds, here, strict=True))
        for kind, text in tried_answers(seed, found["prompt"], references, number).items()
    ]
    while waiting := [episode for episode in episodes if not episode.is_over]:
        turns = [(episode.seed, [episode.answer.text] * episode.answer.turns) for episode in waiting]
        given = await pool.call("trial_respond", turns)
        answers = await pool.judged("trial_respond", turns, [_ended(answer) for answer in given])
        for episode, said, answer in zip(waiting, given, answers, strict=True):
            episode.said(answer, problems.tasks[""].weighing)
            verdict = said.get("verdict", "") if isinstance(said, Mapping) else ""
            episode.answer = replace(episode.answer, verdict=verdict)
    tried = tuple(
        TriedProblem(
            seed=seed,
            prompt=found["prompt"],
            rendered=codec.render_prompt(found["prompt"]),
            prompt_tokens=len(codec.encode_prompt(found["prompt"])),
            reference=found["answer"],
            reading=found["reading"],
            answers=tuple(episode.answer for episode in episodes if episode.seed == seed),
        )
        for seed, found in zip(seeds, here, strict=True)
    )
    is_repeatable = here == there
    bounds = problems.tasks[""].rewards
    warnings = warnings_of(config, bounds, codec, tried, is_repeatable=is_repeatable)
    warnings += tuple(problems.notes())
    return Trial(task=config.task.name, base=config.model.base, bounds=bounds, problems=tried, warnings=warnings)


def _sample(problems: Problems, seed: int) -> Mapping[str, Any]:
    try:
        return problems.trial_problem(seed)
    except Exception as error:
        # A task is a plug-in, so show its author any exception.
        raise ScorerError(
            "The task cannot sample a problem.", got=f"seed {seed}: {error!r}", do="Fix its sample method."
        ) from error


def tried_answers(seed: int, prompt: str, references: Sequence[str | None], number: int) -> dict[AnswerKind, str]:
    """Return the answers that are tried on problem `number`, by kind. `references` are the reference answers of all
    problems."""
    reference, another = references[number], references[(number + 1) % len(references)]
    found = free_answers(seed, prompt, reference)
    if another is not None and another != reference:
        found["another"] = another
    if reference is not None:
        found |= {"reference": reference, "tagged": f"<answer>{reference}</answer>"}
    return found


def free_answers(seed: int, prompt: str, reference: str | None) -> dict[AnswerKind, str]:
    """Return the answers that need no work: empty, the copied prompt, a line of the prompt, and random text."""
    found: dict[AnswerKind, str] = {"empty": "", "copied": prompt}
    if lines := prompt_lines(prompt):
        found["line"] = random.Random(derive_seed(seed, "line")).choice(lines)
    return found | {"random": _random_like(reference, seed)}


def prompt_lines(prompt: str) -> list[str]:
    """Return the lines of a prompt as answers, without list numbers and marks; [] if the prompt has one line."""
    lines = [_LIST_MARK.sub("", line).strip() for line in prompt.splitlines()]
    return [line for line in lines if line] if len(lines) > 1 else []


def _random_like(reference: str | None, seed: int) -> str:
    """Return a different text in the form of the reference answer; random words if there is no reference."""
    rng = random.Random(derive_seed(seed, "random answer"))
    if reference is None or not any(c.isalnum() for c in reference):
        lengths = [rng.randint(1, 8) for _ in range(_RANDOM_WORDS)]
        return " ".join("".join(rng.choices(string.ascii_lowercase + string.digits, k=length)) for length in lengths)
    return "".join(_another(character, rng) for character in reference)


def _another(character: str, rng: random.Random) -> str:
    for kind in (string.digits, string.ascii_lowercase, string.ascii_uppercase):
        if character in kind:
            return rng.choice(kind.replace(character, ""))
    return character


def warnings_of(
    config: HubConfig,
    bounds: RewardBounds,
    codec: PromptCodec,
    tried: Sequence[TriedProblem],
    *,
    is_repeatable: bool | None,
) -> tuple[str, ...]:
    """Return sentences about likely faults of the task. `is_repeatable` is None for environments with hidden state,
    because different problems of such environments may have equal prompts."""
    found = []
    of_all = f"of {len(tried)} problems"
    nothing = max(bounds.lowest, 0.0) if bounds.highest > 0 else bounds.lowest
    for kind in FREE:
        paid = [a.reward for a in _of_kind(tried, kind) if a.reward is not None and a.reward > nothing]
        if paid:
            found.append(f"The {kind} answer is paid on {len(paid)} {of_all}: up to {max(paid):g}.")
    right = [
        [a.reward for a in problem.answers if a.kind in ("reference", "tagged") and a.reward is not None]
        for problem in tried
    ]
    unsolved = [max(rewards) for rewards in right if rewards and not bounds.is_solved(max(rewards))]
    if unsolved:
        found.append(
            f"The reference answer does not earn the highest reward, {bounds.highest:g}, on {len(unsolved)} {of_all}: "
            f"{min(unsolved):g} at the least."
        )
    failed = [answer for problem in tried for answer in problem.answers if answer.error]
    if failed:
        found.append(f"{len(failed)} answers have no reward, the {failed[0].kind} one among them: {failed[0].error}")
    if is_repeatable is False:
        found.append("The same seed gives another problem in another process: sample must depend on the seed alone.")
    if is_repeatable is not None and len(tried) > 1 and len({problem.prompt for problem in tried}) == 1:
        found.append("All problems are the same: sample does not heed its seed, or there is only one.")
    room = codec.context_tokens - config.sampling.max_tokens
    too_long = sum(problem.prompt_tokens > room for problem in tried)
    if too_long:
        found.append(
            f"{too_long} {of_all} leave no room in the context of {config.model.base} for sampling.max_tokens = "
            f"{config.sampling.max_tokens}, and would be passed over: --base names another model."
        )
    unreadable = sum(not _reads(codec, problem) for problem in tried)
    if unreadable:
        found.append(f"{config.model.base} has no tokens for some characters in {unreadable} {of_all}.")
    return tuple(found)


def _of_kind(tried: Sequence[TriedProblem], kind: AnswerKind) -> list[TriedAnswer]:
    return [answer for problem in tried for answer in problem.answers if answer.kind == kind]


def _reads(codec: PromptCodec, problem: TriedProblem) -> bool:
    """Return True if the tokens of the prompt keep all its letters and digits. Tokenizers may change white space."""
    read = codec.text(codec.encode_prompt(problem.prompt))
    return {c for c in problem.rendered if c.isalnum()} <= set(read)
