"""Guess the hidden number: each wrong guess is answered with `>` (it is greater) or `<` (it is less).

The prompt is the range, as `2-8=`; replies are numbers and nothing else. Small enough for `builtin:tiny`, with one
digit and `sampling.max_tokens = 1`; there are few ranges of so small numbers, so `evaluation.problems` must be small
as well.
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
    """How hard it is."""

    digits: Annotated[int, Field(ge=1, le=9)] = 1
    """Of all numbers, which never start with a zero unless they are one digit long."""
    numbers: Annotated[int, Field(ge=2, le=9)] = 7
    """In the widest range; the narrowest has two."""
    turns: Annotated[int, Field(ge=1, le=16)] = 3
    """After so many wrong guesses the game is lost. Among 2**turns - 1 numbers it need not be."""


class GuessEnvironment:
    """The reward is 1 for the hidden number. A lost game earns up to 0.5, the nearer its last guess the more; a last
    reply that is no number in the range earns nothing.

    Of that, a turn that does not end the game earns what it changes of the chance of winning for whoever plays on as
    well as can be: with k guesses left, 2^k - 1 of n possible numbers can be found. So a guess in the middle of more
    than that costs nothing, and one that tells little, or no number at all, costs most of it.
    """

    name = "environment:guess"

    def __init__(self, options: GuessOptions) -> None:
        self._options = options

    def sample(self, seed: int) -> Problem:
        """The game of `seed`; its metadata holds the range, from `low` to `high`, and the `hidden` number."""
        rng = random.Random(seed)
        digits = self._options.digits
        numbers = rng.randint(2, self._options.numbers)
        low = rng.randint(0 if digits == 1 else 10 ** (digits - 1), 10**digits - numbers)
        high = low + numbers - 1
        return Problem(prompt=f"{low}-{high}=", metadata={"low": low, "high": high, "hidden": rng.randint(low, high)})

    def respond(self, problem: Problem, replies: Sequence[str]) -> Response:
        """A reply that is no number in the range is a wasted turn, answered with `?`."""
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
        """Of winning behind these wrong replies, whoever plays on as well as can be."""
        low, high, hidden = (problem.metadata[name] for name in ("low", "high", "hidden"))
        for guess in map(self._guess, wrong):
            if guess is not None and low <= guess <= high:
                low, high = (guess + 1, high) if guess < hidden else (low, guess - 1)
        findable: int = 2 ** (self._options.turns - len(wrong)) - 1
        return min(1.0, findable / int(high - low + 1))


def make_guess(options: Mapping[str, Any]) -> GuessEnvironment:
    """The environment by its options. Raises ConfigError for an option that does not exist or does not fit."""
    return GuessEnvironment(GuessOptions.read("environment:guess", options))
