"""The turns of an episode as texts for people: reply, tool calls, the environment's messages, reward of the turn."""

from __future__ import annotations

from dataclasses import dataclass

from echo_hub.evaluation.by_hub import Episode
from echo_hub.run.answer_frames import AnswerFrames
from echo_hub.run.base_model import PromptCodec
from echo_hub.tasks.tool_calls import calls_made
from echo_shared.records.rollout import CallMade, ObservedMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnInWords:
    """One turn of an episode."""

    reply: str
    num_tokens: int
    calls: tuple[CallMade, ...]
    """Tool calls in the reply, in order."""
    messages: tuple[ObservedMessage, ...]
    """The environment's messages after the reply; () after the last turn."""
    reward: float | None
    """Part of the episode's reward that the turn earned; None if the episode has no reward."""


def turns_in_words(episode: Episode, codec: PromptCodec) -> tuple[TurnInWords, ...]:
    """Return the turns of a played episode, with their rewards. The last turn earned the episode's reward minus the
    rewards of the earlier turns."""
    frames = AnswerFrames(codec)
    earlier = episode.turn_rewards
    rest = None if episode.reward is None else float(episode.reward) - sum(earlier)
    return tuple(
        TurnInWords(
            reply=codec.decode(ids),
            num_tokens=len(ids),
            calls=calls_made(codec.reply(ids)),
            messages=frames.messages(episode.observations[place]) if place < len(episode.observations) else (),
            reward=earlier[place] if place < len(earlier) else rest,
        )
        for place, ids in enumerate(episode.turns)
    )
