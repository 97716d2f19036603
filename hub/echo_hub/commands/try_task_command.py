"""`echo-hub try-task`: show a task's problems and rewards before any run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import tempfile
import tomllib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echo_hub.commands.answer_text import print_base_answers
from echo_hub.commands.progress_line import progress_line
from echo_hub.commands.until_stopped import run_until_stopped
from echo_hub.config.file import load_config
from echo_shared.errors import ConfigError

if TYPE_CHECKING:
    from echo_hub.config.sections import HubConfig
    from echo_hub.evaluation.base_answers import BaseAnswers
    from echo_hub.evaluation.by_hand import PlayedByHand
    from echo_hub.evaluation.by_hub import AnswerScorer, EpisodeJudge
    from echo_hub.evaluation.evaluator import Evaluator
    from echo_hub.evaluation.work_count import WorkCount
    from echo_hub.scoring.pool import ScoringPool
    from echo_hub.scoring.problems import Problems
    from echo_hub.scoring.trial import Trial, TriedAnswer, TriedProblem
    from echo_hub.sessions.host import SessionHost

console = Console(soft_wrap=True, highlight=False)
TYPED: Final = "-"
"""Value of --replies for replies that are typed, or piped to standard input."""
ABSENCE_S: Final = 2.0
"""Seconds between two checks whether the environment can be reached."""


EnvPythonOption = Annotated[
    Path | None,
    typer.Option(metavar="PATH", help="The Python interpreter that has the environment's package, as sessions.python."),
]


def sessions_flags(env_python: Path | None) -> dict[str, dict[str, Any]]:
    """Return the settings of sessions for `--env-python`. An absolute path is returned, so that any directory can serve
    the run. Raises ConfigError if there is no such program."""
    if env_python is None:
        return {}
    place = env_python.expanduser().absolute()  # Not resolved: an environment's interpreter is a link.
    if not place.is_file():
        raise ConfigError(
            "The environment's Python interpreter does not exist.",
            got=f"--env-python {env_python}",
            do="Name a file such as agents/bin/python, after: python3 -m venv agents",
        )
    return {"sessions": {"python": str(place)}}


def try_task(
    task: Annotated[
        str | None,
        typer.Argument(metavar="[TASK]", help="A value for task.name, or a mixture's key; default: from the settings."),
    ] = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="One of task.options, its value as TOML; repeatable.")
    ] = None,
    settings: Annotated[
        Path | None, typer.Option("--config", metavar="TOML", help="Settings of a run, RUN/config.toml.")
    ] = None,
    base: Annotated[str | None, typer.Option(help="The base model whose tokenizer renders prompts.")] = None,
    count: Annotated[int, typer.Option(min=1, max=1_000, help="Number of problems.")] = 4,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed; another one gives other problems.")] = None,
    sample: Annotated[
        int | None,
        typer.Option(
            min=1, max=1_000, help="Let the base model answer this many problems, with a group of the run's size each."
        ),
    ] = None,
    replies: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Play one episode with the replies in this file, one a line; - means: type them."
        ),
    ] = None,
    env_python: EnvPythonOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Sample a few problems of a task, and show the rewards of various answers, including wrong ones.

    With --sample the base model answers, and the verdict says whether its rewards give GRPO a training signal. With
    --replies you answer, turn by turn. Both show whole episodes of a task that has several turns.

    Progress is printed on stderr.
    """
    given = {"model": {"base": base}, "run": {"seed": seed}, **sessions_flags(env_python)}
    config = _of_one_task(settings, task, dict(map(option_of, option or ())), given)
    if sample is not None:
        from echo_hub.evaluation.work_count import WorkCount

        completions = WorkCount(doing="Sampling", units="completions")
        with progress_line(completions):
            answered = run_until_stopped(_answer(config, sample, completions), stopped="sample again")
        if answered is not None and as_json:
            _echo_json(answered)
        elif answered is not None:
            print_base_answers(answered)
        return
    if replies is not None:
        _play(config, replies, as_json=as_json)
        return
    tried = asyncio.run(_try(config, count))
    if as_json:
        _echo_json(tried)
        return
    for number, problem in enumerate(tried.problems, start=1):
        _print(problem, f"Problem {number} of {len(tried.problems)}")
    for warning in tried.warnings:
        console.print(Text.assemble(("Warning: ", "yellow"), warning))
    if not tried.warnings:
        console.print("No problems found: wrong answers earn nothing.")


def _echo_json(found: object) -> None:
    from echo_hub.dashboard.responses import jsonable

    typer.echo(json.dumps(jsonable(found), indent=2, allow_nan=False))


def _of_one_task(settings: Path | None, task: str | None, options: dict[str, Any], given: dict[str, Any]) -> HubConfig:
    """Return the settings with only this task. Raises ConfigError if the settings have several tasks, but none named
    `task`."""
    config = load_config(settings, given)
    mixture = config.task.mixture
    if not mixture:
        config = load_config(settings, {**given, "task": {"name": task, "options": options}})
        config.check_trains()
        return config
    if task not in mixture:
        raise ConfigError(
            "These settings have several tasks.",
            got=f"{'no task' if task is None else repr(task)}, of {', '.join(mixture)}",
            do=f"Name one of them: echo-hub try-task {next(iter(mixture))} --config {settings}",
        )
    alone = config.task.alone(task)
    alone = alone.model_copy(update={"options": {**alone.options, **options}})
    evaluation = config.evaluation.model_copy(update={"sets": {}})
    return config.model_copy(update={"task": alone, "evaluation": evaluation})


def option_of(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE. A value that is no valid TOML is a text. Raises ConfigError if the name is missing."""
    name, is_there, value = text.partition("=")
    if not is_there or not name.strip():
        raise ConfigError(
            "A task option must have the form NAME=VALUE.", got=f"--option {text}", do="Example: --option letters=6"
        )
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value


async def _try(config: HubConfig, count: int) -> Trial:
    from echo_hub.evaluation.session_trial import try_sessions
    from echo_hub.scoring.trial import try_task as tried

    async with _opened(config) as opened:
        problems = opened.problems
        if problems.session_tasks:
            return await try_sessions(config, problems, judge=opened.judge, count=count)
        return await tried(config, problems, problems.codec, pool=opened.pool, count=count)


async def _answer(config: HubConfig, count: int, completions: WorkCount) -> BaseAnswers:
    from echo_hub.evaluation.base_answers import base_answers
    from echo_hub.evaluation.by_hub import drawn_by

    async with _opened(config, completions) as opened:
        completions.total = count * config.training.group_size
        generate = drawn_by(opened.evaluator, None)
        return await base_answers(
            config, opened.problems, pool=opened.pool, judge=opened.judge, generate=generate, count=count
        )


def _play(config: HubConfig, replies: str, *, as_json: bool) -> None:
    from echo_hub.commands.answer_text import print_end_of_play, print_played

    is_typed = replies == TYPED and sys.stdin.isatty() and not as_json
    played = run_until_stopped(_play_episode(config, replies, is_typed=is_typed), stopped="play again")
    if played is None:
        return
    if as_json:
        _echo_json(played)
    elif is_typed:
        print_end_of_play(played)
    else:
        print_played(played)


async def _play_episode(config: HubConfig, replies: str, *, is_typed: bool) -> PlayedByHand:
    from echo_hub.commands.typed_replies import TypedReplies
    from echo_hub.evaluation.by_hand import ListedReplies, play_by_hand, replies_of_file

    given = [] if is_typed else sys.stdin.read().splitlines() if replies == TYPED else replies_of_file(Path(replies))
    async with _opened(config) as opened:
        source = TypedReplies(opened.problems.codec) if is_typed else ListedReplies(given)
        return await play_by_hand(config, opened.problems, source=source, judge=opened.judge)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Opened:
    """A task that is opened without a run. The evaluator starts when it is first needed."""

    problems: Problems
    pool: ScoringPool
    evaluator: Evaluator
    judge: AnswerScorer | EpisodeJudge


@contextlib.asynccontextmanager
async def _opened(config: HubConfig, completions: WorkCount | None = None) -> AsyncIterator[_Opened]:
    """Open a task without a run. The evaluator counts its progress in `completions`."""
    from echo_hub.evaluation.evaluator import evaluator_of
    from echo_hub.learner.settings import LearnerSettings
    from echo_hub.lifecycle.cluster_of_run import open_cluster
    from echo_hub.run.base_files import resolve_base
    from echo_hub.run.base_model import PromptCodec
    from echo_hub.scoring.pool import ScoringPool
    from echo_hub.scoring.problems import Problems
    from echo_hub.tasks.stream import HeldOutProblems

    base_dir = resolve_base(config.model.base)
    codec = PromptCodec.of_run(config, base_dir)
    async with contextlib.AsyncExitStack() as stack:
        logs = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="echo-try-task-")))
        problems = Problems.of_run(
            config, codec, held_out={"": HeldOutProblems(prompts=())}, base_dir=base_dir, run_dir=logs
        )
        stack.callback(problems.close)
        settings = LearnerSettings.of_run(
            config, base_dir=base_dir, stop_ids=codec.stop_ids, multi_turn=problems.multi_turn
        )
        cluster = await stack.enter_async_context(open_cluster(config, base_dir, logs=logs, kinds=("scorer",)))
        pool = await stack.enter_async_context(
            ScoringPool.open(config, problems, base_dir=base_dir, logs=logs, cluster=cluster, is_patient=False)
        )
        evaluator = evaluator_of(settings, logs=logs, cluster=None, is_patient=False, count=completions)
        stack.push_async_callback(evaluator.stop)
        judge = await stack.enter_async_context(_judged(config, problems, pool))
        yield _Opened(problems=problems, pool=pool, evaluator=evaluator, judge=judge)


@contextlib.asynccontextmanager
async def _judged(
    config: HubConfig, problems: Problems, pool: ScoringPool
) -> AsyncIterator[AnswerScorer | EpisodeJudge]:
    """Yield the scorer of the task's episodes: its scoring processes, or a session host if the task has state."""
    from echo_hub.evaluation.base_answers import trial_judge
    from echo_hub.evaluation.by_sessions import SessionJudge
    from echo_hub.scoring.session_scorer import SessionScorer
    from echo_hub.sessions.host import SessionHost

    others = trial_judge(pool)
    if not problems.session_tasks:
        yield others
        return
    async with SessionHost.open(problems.session_tasks, config.sessions) as host, _telling_absence(host):
        sessions = SessionScorer(host, problems, pool)
        judge = SessionJudge(sessions, problems, others=others, losses=config.sessions.losses, share=1)
        try:
            yield judge
        finally:
            await judge.close()


@contextlib.asynccontextmanager
async def _telling_absence(host: SessionHost) -> AsyncIterator[None]:
    """Inside the block, tell the user while an environment does not answer, so that the wait is explained."""

    async def tell() -> None:
        told = ""
        while True:
            await asyncio.sleep(ABSENCE_S)
            if host.absence != told:
                told = host.absence
                typer.echo(f"Waiting: {told}" if told else "The environment is back.", err=True)

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()


def _print(problem: TriedProblem, title: str) -> None:
    from echo_hub.dashboard.formats import excerpt, visible

    console.print(Text(f"{title}: {problem.prompt_tokens} tokens", style="bold"))
    console.print(Text("\n".join(f"  | {line}" for line in visible(problem.rendered).split("\n"))))
    reference = "none: no `answer` in its metadata" if problem.reference is None else excerpt(problem.reference)
    reading = f" ({problem.reading})" if problem.reading else ""
    console.print(Text(f"  reference answer: {reference}{reading}"))
    table = Table("  Answer", "Reward", "Text", box=None)
    for answer in problem.answers:
        table.add_row(Text(f"  {answer.kind}"), Text(_reward(answer)), Text(excerpt(answer.text, 60)))
    Console(width=200, highlight=False).print(table)
    console.print()


def _reward(answer: TriedAnswer) -> str:
    if answer.reward is None:
        return f"none: {answer.error}"
    turns = f" after {answer.turns} turns" if answer.turns > 1 else ""
    parts = ", ".join(f"{name} {value:g}" for name, value in (answer.components or {}).items())
    verdict = f", {answer.verdict}" if answer.verdict else ""
    return f"{answer.reward:g}{turns}{verdict}" + (f" ({parts})" if parts else "")
