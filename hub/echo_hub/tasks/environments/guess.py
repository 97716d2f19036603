"""Guess the hidden number. The answer to a wrong guess is `>` (the number is greater) or `<` (the number is less).

The prompt is the range, as in `2-8=`, and replies are bare numbers. Simple enough for `builtin:tiny`, with one digit
and `sampling.max_tokens = 1`. With few digits there are few ranges, so `evaluation.problems` must be small as well.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Observation, Response
from echo_hub.tasks.options import TaskOptions


class GuessOptions(TaskOptions):
    """Options that set the difficulty."""

    digits: Annotated[int, Field(ge=1, le=9)] = 1
    """Digits of all numbers. Numbers of several digits never start with a zero."""
    numbers: Annotated[int, Field(ge=2, le=9)] = 7
    """Number of numbers in the widest range. The narrowest range has two."""
    turns: Annotated[int, Field(ge=1, le=16)] = 3
    """After this many wrong guesses, the game is lost. Among 2**turns - 1 numbers, perfect play always wins."""


class GuessEnvironment:
    """The reward is 1 for the hidden number. A lost game gives up to 0.5, the more the nearer its last guess was.
    If the last guess lies outside the range or is not a number, the reward is 0.

    Each turn before the end earns the change of the chance to win with perfect play from then on: with k guesses left,
    perfect play finds any of 2^k - 1 numbers. So a guess near the middle of the range costs nothing, and an
    uninformative or invalid guess costs most of the chance.
    """

    name = "environment:guess"

    def __init__(self, options: GuessOptions) -> None:
        self._options = options

    def sample(self, seed: int) -> Problem:
        """Return the game of `seed`. Its metadata holds the range, `low` to `high`, and the `hidden` number."""
        rng = random.Random(seed)
        digits = self._options.digits
        numbers = rng.randint(2, self._options.numbers)
        low = rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - numbers)
        high = low + numbers - 1
        return Problem(prompt=f"{low}-{high}=", metadata={"low": low, "high": high, "hidden": rng.randint(low, high)})

    def respond(self, problem: Problem, replies: Sequence[str]) -> Response:
        """Answer the last guess. An invalid number uses up the turn, and its answer is `?`."""
        low, high, hidden = (problem.metadata[name] for name in ("low", "high", "hidden"))
        guess = self._guess(replies[-1])
        if guess == hidden:
            return Ending(reward=1.0)
        near = 0.0
        hint = "?"
        if guess is not None and low <= guess <= high:
            near = 0.5 * (1 - abs(guess - hidden) / (high - low))
            hint = ">" if hidden > guess else "<"
        if len(replies) == self._options.turns:
            return Ending(reward=near)
        gained = self._chance(problem, replies) - self._chance(problem, replies[:-1])
        return Observation(text=f"{hint}=", reward_if_cut=near, turn_reward=gained)

    def _guess(self, reply: str) -> int | None:
        text = reply.strip()
        is_number = text.isascii() and text.isdigit() and len(text) == self._options.digits
        return int(text) if is_number else None

    def _chance(self, problem: Problem, wrong: Sequence[str]) -> float:
        """Return the probability that perfect play still wins after these wrong replies."""
        low, high, hidden = (problem.metadata[name] for name in ("low", "high", "hidden"))
        for guess in map(self._guess, wrong):
            if guess is not None and low <= guess <= high:
                low, high = (guess + 1, high) if guess < hidden else (low, guess - 1)
        findable: int = 2 ** (self._options.turns - len(wrong)) - 1
        return min(1.0, findable / int(high - low + 1))


def make_guess(options: Mapping[str, Any]) -> GuessEnvironment:
    """Create the environment. Raises ConfigError for an unknown or invalid option."""
    return GuessEnvironment(GuessOptions.read("environment:guess", options))
