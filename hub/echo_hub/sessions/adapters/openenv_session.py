"""One episode of an OpenEnv environment.

The reward of an episode is the sum of its steps' rewards, clipped to the declared bounds. A turn earns what it adds to
the clipped sum. So the rewards of all turns add up to the episode's reward.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from echo_hub.sessions.adapters.openenv_options import PLACEHOLDER, UNCLIPPED, OpenEnvOptions
from echo_hub.sessions.adapters.openenv_socket import OpenEnvSocket
from echo_hub.sessions.adapters.openenv_texts import ActionTry, attempts, mistake_text, observation_text, prompt_text
from echo_hub.sessions.adapters.openenv_wire import ServerError, ServerState, StrangeAnswerError
from echo_hub.tasks.environments.base import Ending, Message, Observation, Opening, Reply, Response, SessionGone
from echo_hub.tasks.rewards import MAX_REWARD


@dataclass(slots=True)
class RunningReward:
    """Sum of the steps' rewards of one episode so far, and its clipped value."""

    bounds: tuple[float, float]
    sum: float = 0.0
    counted: float = field(init=False)
    """The clipped sum at the end of the previous turn."""

    def __post_init__(self) -> None:
        self.counted = self.clipped

    @property
    def clipped(self) -> float:
        low, high = self.bounds
        return min(max(self.sum, low), high)

    def end_turn(self) -> float:
        """Return what this turn adds to the clipped sum, and begin the next turn."""
        earned = self.clipped - self.counted
        self.counted = self.clipped
        return earned

    def ending(self) -> Ending:
        unclipped = min(max(self.sum, -MAX_REWARD), MAX_REWARD)
        return Ending(reward=self.clipped, components={UNCLIPPED: unclipped})


class OpenEnvSession:
    """A session at the OpenEnv server behind `socket`. `seed` is None if the server gets no seed."""

    def __init__(self, socket: OpenEnvSocket, options: OpenEnvOptions, *, seed: int | None) -> None:
        self._socket = socket
        self._options = options
        self._seed = seed
        self._rewards = RunningReward(options.reward_bounds)
        self._turns = 0

    async def reset(self) -> Opening:
        stepped = await self._socket.reset(reset_arguments(self._options, self._seed))
        if stepped.done:
            raise SessionGone("The server's episode is over after its reset.", got="done = true")
        try:
            shown = stepped.observation if PLACEHOLDER in self._options.prompt else None
            return Opening(text=prompt_text(shown, self._options))
        except StrangeAnswerError as error:
            raise _unusable(error) from error

    async def step(self, reply: Reply) -> Response:
        """Send the reply's actions in order, until one ends the episode."""
        wanted = attempts(reply.text, self._options)
        self._turns += 1
        messages: list[Message] = []
        for attempt in wanted:
            message, is_over = await self._try(attempt)
            if is_over:
                return self._rewards.ending()
            messages.append(message)
        # A reply without any tool call ends the episode.
        if not messages or self._turns >= self._options.turns:
            return self._rewards.ending()
        first, *more = messages
        return Observation(
            text=first.text,
            role=first.role,
            name=first.name,
            tool_call_id=first.tool_call_id,
            more=tuple(more),
            turn_reward=self._rewards.end_turn(),
            reward_if_cut=self._rewards.clipped,
        )

    async def score(self) -> Ending:
        return self._rewards.ending()

    async def close(self) -> None:
        await self._socket.close()

    async def state(self) -> ServerState:
        """Return what the server says about the session: its number of steps. Raises SessionGone."""
        return await self._socket.state()

    async def _try(self, attempt: ActionTry) -> tuple[Message, bool]:
        """Send one action. Return the answering message, and True if the episode is over."""
        if attempt.action is None:
            return self._mistake(attempt, attempt.mistake)
        answer = await self._socket.step(attempt.action)
        if isinstance(answer, ServerError):
            if answer.code in self._options.mistakes:
                return self._mistake(attempt, mistake_text(answer))
            raise SessionGone("The server failed in a step.", got=answer.text, do="See the server's log.")
        self._rewards.sum += answer.reward
        try:
            return attempt.message(observation_text(answer.observation, self._options)), answer.done
        except StrangeAnswerError as error:
            if answer.done:  # The model reads nothing after the end.
                return attempt.message(""), True
            raise _unusable(error) from error

    def _mistake(self, attempt: ActionTry, text: str) -> tuple[Message, bool]:
        self._rewards.sum += self._options.mistake_reward
        return attempt.message(text), self._options.on_mistake == "end"


def reset_arguments(options: OpenEnvOptions, seed: int | None) -> Mapping[str, Any]:
    """Return the arguments of a reset. `seed` is None if the server gets no seed."""
    return dict(options.reset) if seed is None else {"seed": seed, **options.reset}


def _unusable(error: StrangeAnswerError) -> SessionGone:
    return SessionGone("The server's answer cannot be used.", got=str(error), do="Correct task.options.")
