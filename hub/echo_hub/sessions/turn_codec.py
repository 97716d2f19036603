"""Tokens of an episode's turns: completions as texts, and the environment's answers as token ids.

Sessions and environments without state use the same code, so an answer with the same text has the same token ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.run.base_model import PromptCodec
from echo_hub.sessions.turns import NextTurn, PlayedTurn
from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import Environment, Observation, Opening, Reply, SessionGone
from echo_shared.errors import ConfigError

MOST_CHARACTERS: Final = 32
"""Largest number of characters of an observation for each token of the context. A longer observation counts as too long
without being tokenized: megabytes would take minutes."""
_SHOWN: Final = 80
"""Number of characters of a prompt that an error shows."""


class TurnCodec:
    """Turns token ids into text and text into token ids, for the turns of one task's episodes."""

    def __init__(self, codec: PromptCodec, *, max_tokens: int) -> None:
        """`codec` knows the task's prompt template and tools. `max_tokens` is the largest number of tokens of a
        completion."""
        self._codec = codec
        self._max_tokens = max_tokens

    def reply(self, turn: PlayedTurn) -> Reply:
        return Reply(
            text=self._codec.reply(turn.completion_ids),
            ids=tuple(turn.completion_ids.tolist()),
            logprobs=tuple(turn.logprobs.tolist()),
            finish_reason=turn.finish_reason,
        )

    def prompt_ids(self, problem: Problem) -> NDArray[np.int32]:
        if problem.prompt_ids:
            return np.asarray(problem.prompt_ids, dtype=np.int32)
        return self._codec.encode_prompt(problem.prompt)

    def observation_ids(self, observation: Observation, *, after: int) -> NDArray[np.int32]:
        """Return the token ids between a completion, whose last id is `after`, and the next completion."""
        if observation.ids:
            if not self._codec.has_ids(observation.ids):
                raise SessionGone("The environment gave token ids that the base model does not have.")
            return np.asarray(observation.ids, dtype=np.int32)
        messages = [message.fields for message in (observation, *observation.more)]
        return self._codec.encode_answer(messages, after=after)

    def check_opening(self, problem: Problem, opening: Opening) -> None:
        """Raise SessionGone if a session does not begin with the problem's prompt."""
        if opening.ids:
            is_same = np.array_equal(np.asarray(opening.ids, dtype=np.int32), self.prompt_ids(problem))
        else:
            is_same = opening.text == problem.prompt
        if not is_same:
            raise SessionGone(
                "The session begins with another prompt than its problem.",
                got=f"{opening.text[:_SHOWN]!r} for {problem.prompt[:_SHOWN]!r}",
            )

    def next_turn(self, problem: Problem, turns: Sequence[PlayedTurn], observation: Observation) -> NextTurn | None:
        """Return the tokenized answer to the last of `turns`; None if the context has no room for another turn. Raises
        SessionGone if the base model cannot read the observation."""
        messages = (observation, *observation.more)
        least = len(observation.ids) + len(messages) + sum(len(one.text) for one in messages) // MOST_CHARACTERS
        if least > self._codec.context_tokens:
            return None
        try:
            ids = self.observation_ids(observation, after=int(turns[-1].completion_ids[-1]))
        except ConfigError as error:
            raise SessionGone("The base model cannot read the environment's observation.", got=error.brief) from error
        lengths = [len(part) for turn in turns for part in (turn.completion_ids, turn.observation_ids)]
        if not self.has_room(problem, [*lengths, len(ids)]):
            return None
        return NextTurn(observation_ids=ids, turn_reward=observation.turn_reward)

    def has_room(self, problem: Problem, lengths: Sequence[int]) -> bool:
        """Return True if the context has room for another completion after the problem's prompt and after turns and
        observations of these `lengths`, in tokens."""
        said = len(self.prompt_ids(problem)) + sum(lengths)
        return said + self._max_tokens <= self._codec.context_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTask:
    """A task of the run whose environment has state."""

    environment: Environment
    codec: TurnCodec
