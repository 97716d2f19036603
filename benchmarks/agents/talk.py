"""An environment that answers every turn with a text of fixed length, whatever the model says."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Ending, Observation, Response
from echo_hub.tasks.options import TaskOptions


class TalkOptions(TaskOptions):
    """Options of the task: the number of turns of an episode, and the lengths of prompt and answers in digits."""

    turns: int = Field(default=10, ge=1)
    prompt_digits: int = Field(default=64, ge=1)
    answer_digits: int = Field(default=24, ge=1)


class TalkEnvironment:
    """An environment whose episodes end after a fixed number of turns. An episode's reward is the share of replies that
    begin with a digit.
    """

    name = "python:benchmarks.agents.talk:make"

    def __init__(self, options: TalkOptions) -> None:
        self._options = options

    def sample(self, seed: int) -> Problem:
        return Problem(prompt=_digits(seed, self._options.prompt_digits))

    def respond(self, problem: Problem, replies: Sequence[str]) -> Response:
        if len(replies) == self._options.turns:
            return Ending(reward=sum(reply[:1].isdigit() for reply in replies) / len(replies))
        return Observation(text=_digits(len(replies), self._options.answer_digits))


def _digits(seed: int, count: int) -> str:
    return "".join(random.Random(seed).choices("0123456789", k=count))


def make(options: Mapping[str, Any]) -> TalkEnvironment:
    return TalkEnvironment(TalkOptions.model_validate(options))
