"""Print model answers and their rewards, for `echo-hub eval` and `echo-hub try-task --sample`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.text import Text

from echo_hub.dashboard.formats import visible
from echo_shared.records.rewards import components_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from echo_hub.evaluation.base_answers import AnsweredProblem, BaseAnswers
    from echo_hub.evaluation.by_hand import PlayedByHand
    from echo_hub.evaluation.examples import AnswerExample
    from echo_hub.evaluation.turns_in_words import TurnInWords
    from echo_shared.records.rollout import ObservedMessage

console = Console(soft_wrap=True, highlight=False)
MOST_CHARACTERS: Final = 2_000
"""Largest number of characters that are printed of a text. From a longer text, only the beginning and the end are
printed."""
SHOWN: Final = 2
"""Number of completions printed for each group: the first solved and the first unsolved one, if both exist."""


def print_example(example: AnswerExample) -> None:
    version = "base" if example.policy_version == 0 else f"version {example.policy_version}"
    of_set = f", {example.name}" if example.name else ""
    console.print(Text(f"\nExample of {version}{of_set}", style="bold"))
    _print_text("asked", example.prompt)
    _print_text("answered", example.completion)
    is_cut, error = example.is_cut, example.error
    said = _verdict(example.reward, is_solved=example.is_solved, is_cut=is_cut, error=error)
    console.print(Text(f"  {said}; {example.num_tokens} tokens"))


def print_base_answers(found: BaseAnswers) -> None:
    """Print all problems, then the figures and the verdict."""
    for number, problem in enumerate(found.problems, start=1):
        console.print(Text(f"Problem {number} of {len(found.problems)}", style="bold"))
        _print_group(problem)
    plus_minus = f" ± {found.solved_error:.1%}" if len(found.problems) > 1 else ""
    console.print(Text(f"Base         {found.base}, in {found.seconds:.0f} s"))
    console.print(
        Text(f"Solved       {found.solved_rate:.1%}{plus_minus}: {found.num_solved} of {found.num_scored} completions")
    )
    console.print(Text(f"Mean reward  {found.mean_reward:.3g}"))
    groups = f"{found.num_mixed} of {len(found.problems)} groups of {found.group_size}"
    console.print(Text(f"Mixed        {groups} have differing rewards; the others give no training signal"))
    for warning in found.warnings:
        console.print(Text.assemble(("Warning: ", "yellow"), warning))
    console.print(Text(found.verdict, style="bold"))


def _print_group(problem: AnsweredProblem) -> None:
    _print_text("asked", problem.rendered)
    if problem.reference is not None:
        _print_text("reference", problem.reference)
    first = {answer.is_solved: answer for answer in reversed(problem.answers)}
    shown = sorted(first.values(), key=problem.answers.index)
    if len(shown) < SHOWN:
        shown = list(problem.answers[:SHOWN])
    for answer in shown:
        if answer.turns:
            print_turns(answer.turns)
        else:
            _print_text("answered", answer.text)
        said = _verdict(answer.reward, is_solved=answer.is_solved, is_cut=answer.is_cut, error=answer.error)
        paid_as = f'; would be solved as "{answer.paid_as}"' if answer.paid_as else ""
        console.print(Text(f"  {said}; {answer.num_tokens} tokens{paid_as}"))
    rewards = " ".join("none" if one.reward is None else f"{one.reward:g}" for one in problem.answers)
    console.print(Text(f"  rewards of the group: {rewards}\n"))


def print_prompt(text: str) -> None:
    _print_text("asked", text)


def print_played(played: PlayedByHand) -> None:
    """Print an episode that was played by hand."""
    print_prompt(played.prompt)
    print_turns(played.turns)
    print_end_of_play(played)


def print_end_of_play(played: PlayedByHand) -> None:
    if not played.has_ended:
        console.print(Text("  The episode has not ended: there were no more replies."))
        return
    said = _verdict(played.reward, is_solved=played.is_solved, is_cut=False, error=played.error)
    count = len(played.turns)
    console.print(Text(f"  ended after {count} turn{'s' if count != 1 else ''}: {said}", style="bold"))


def print_turns(turns: Sequence[TurnInWords]) -> None:
    """Print each turn of an episode: the reply, its tool calls, the environment's messages, and the turn's reward."""
    for number, turn in enumerate(turns, start=1):
        earned = "" if turn.reward is None else f", earned {turn.reward:+g}"
        console.print(Text(f"  turn {number}: {turn.num_tokens} tokens{earned}"))
        _print_text("reply", turn.reply)
        for call in turn.calls:
            what = call.problem or f"{call.name} {call.arguments}"
            _print_text("bad call" if call.problem else "call", what)
        print_messages(turn.messages)


def print_messages(messages: Sequence[ObservedMessage]) -> None:
    for message in messages:
        _print_text("result" if message.role == "tool" else "observed", message.text)


def _print_text(title: str, text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        half = MOST_CHARACTERS // 2
        text = f"{text[:half]}\n[... {len(text) - 2 * half:,} characters ...]\n{text[-half:]}"
    lines = visible(text).split("\n")
    console.print(Text("\n".join([f"  {title:<9} | {lines[0]}", *(f"  {'':<9} | {line}" for line in lines[1:])])))


def _verdict(reward: float | None, *, is_solved: bool, is_cut: bool, error: str) -> str:
    if reward is None:
        return f"no reward: {error}"
    parts = ", ".join(f"{name} {value:g}" for name, value in (components_of(reward) or {}).items())
    solved = "solved" if is_solved else "not solved"
    cut = ", cut off at sampling.max_tokens" if is_cut else ""
    return f"{solved}, reward {reward:g}{f' ({parts})' if parts else ''}{cut}"
