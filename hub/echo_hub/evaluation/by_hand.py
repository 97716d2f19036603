"""Play an episode of a task with replies from a person or a file. No model is loaded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from echo_hub.config.sections import HubConfig
from echo_hub.evaluation.base_answers import training_problems
from echo_hub.evaluation.by_hub import AnswerScorer, EpisodeJudge, Generated, episodes_of, play_all
from echo_hub.evaluation.turns_in_words import TurnInWords, turns_in_words
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_shared.errors import ConfigError, EchoError
from echo_shared.process.abandonable import abandonable
from echo_shared.records.run import EvaluationKind
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.wire.messages import FinishReason


class RepliesEnded(EchoError):
    """The source has no further reply, but the episode continues."""


class ReplySource(Protocol):
    """A source of replies: a person or a file."""

    def reply(self, request: GroupRequest) -> str | None:
        """Return the reply to a request. The request's prompt is the whole conversation so far. Return None if no reply
        is left. May block."""


class ListedReplies:
    """A source that returns the replies of a list, in order."""

    def __init__(self, replies: Sequence[str]) -> None:
        self._waiting = iter(replies)

    def reply(self, request: GroupRequest) -> str | None:
        return next(self._waiting, None)


def replies_of_file(path: Path) -> list[str]:
    """Read replies from a file: a JSON list of texts if its name ends in .json, else one reply a line.

    Raises ConfigError if the file cannot be read or holds anything else.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("The file of replies cannot be read.", got=f"{path}: {error}") from error
    if path.suffix != ".json":
        return text.splitlines()
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError("The file of replies is not JSON.", got=f"{path}: {error}") from error
    if not isinstance(found, list) or not all(isinstance(reply, str) for reply in found):
        raise ConfigError(
            "The file of replies must hold a list of texts.", got=str(path), do='Example: ["first reply", "second"]'
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class HandGenerator:
    """Takes the place of a model: a generator of completions (`echo_hub.evaluation.by_hub.Generator`) whose tokens
    encode a person's replies.

    Replies longer than `sampling.max_tokens` are cut, because nodes cut them.
    """

    codec: PromptCodec
    source: ReplySource

    async def __call__(self, requests: Sequence[GroupRequest], *, greedy: bool) -> Generated:
        """Return the next replies as completions. Raises RepliesEnded, and ConfigError for a text that cannot be a
        reply."""
        return Generated(rollouts=[await self._rollout(request) for request in requests], seconds=0.0)

    async def _rollout(self, request: GroupRequest) -> FinishedRollout:
        text = await abandonable(self.source.reply, request)
        if text is None:
            raise RepliesEnded("The episode continues, but there is no further reply.")
        whole = self.codec.encode_reply(text)
        ids = whole[: request.max_tokens]
        (index,) = request.indices
        return FinishedRollout(
            lease_id=request.lease_id,
            group_id=request.group_id,
            index=index,
            policy_version=request.policy_version,
            completion_ids=ids,
            behavior_logprobs=np.zeros(len(ids), np.float32),
            finish_reason=FinishReason.LENGTH if len(ids) < len(whole) else FinishReason.STOP,
            sampling_s=0.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedByHand:
    """An episode with a person's replies, complete or unfinished."""

    prompt: str
    """The prompt as the base model would receive it."""
    turns: tuple[TurnInWords, ...]
    reward: float | None
    """Reward of the episode; None if it has not ended, or if the scorer failed."""
    is_solved: bool
    error: str
    """The scorer's error; "" if there is none."""
    has_ended: bool


async def play_by_hand(
    config: HubConfig,
    problems: Problems,
    *,
    source: ReplySource,
    judge: AnswerScorer | EpisodeJudge,
    number: int = 0,
    index: int = 0,
) -> PlayedByHand:
    """Play one episode of the run's only task, on training problem `number`, until it ends or `source` has no reply.
    Episodes of one problem that are played at the same time need different values of `index`.

    Raises ConfigError for a text that cannot be a reply, and the errors of sampling the problem.
    """
    asked = await training_problems(config, problems, count=number + 1, samples=1)
    asked = replace(asked, prompts=asked.prompts[number:], first=number)
    (episode,) = episodes = episodes_of(asked, EvaluationKind.SAMPLED)
    episode.index = index
    generate = HandGenerator(codec=problems.codec, source=source)
    has_ended = True
    try:
        await play_all(episodes, 0, EvaluationKind.SAMPLED, asked, generate=generate, judge=judge)
    except RepliesEnded:
        has_ended = False
    return PlayedByHand(
        prompt=problems.codec.text(asked.prompts[0]),
        turns=turns_in_words(episode, problems.codec),
        reward=episode.reward,
        is_solved=episode.reward is not None and asked.rewards.is_solved(episode.reward),
        error=episode.error,
        has_ended=has_ended,
    )
