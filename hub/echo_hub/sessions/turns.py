"""Values that pass between the hub and its session host: keys of sessions, played turns, and answers to the last
turn."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from echo_hub.tasks.environments.base import Ending

_NONE: Final = np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class SessionKey:
    """Names a session by group, episode (`index`) and attempt. `attempt` counts the restarts of the episode.

    Evaluation groups have distinct ids, so their sessions have keys as well.
    """

    group_id: int
    index: int
    attempt: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedTurn:
    """A turn of the model, with the environment's stored answer."""

    completion_ids: NDArray[np.int32]
    finish_reason: Literal["stop", "length"] = "stop"
    logprobs: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, dtype=np.float32))
    """Log-probabilities of `completion_ids`, in nats; empty if they are unknown."""
    observation_ids: NDArray[np.int32] = field(default_factory=lambda: _NONE)
    """Token ids between this turn and the next. Empty for the last turn, which waits for its answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextTurn:
    """The episode continues."""

    observation_ids: NDArray[np.int32]
    """Token ids between the answered turn and the next one."""
    turn_reward: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeEnd:
    """The episode ended with the turn that was answered."""

    ending: Ending | None
    """The episode's ending. None if the environment refused to continue: then the episode counts as lost, and earns the
    reward of lost episodes."""
    refusal: str = ""
    """Why the environment refused to go on, for example because it cannot branch."""


TurnAnswer = NextTurn | EpisodeEnd


@dataclass(frozen=True, slots=True, kw_only=True)
class Diverged:
    """A rebuilt session answers an earlier turn differently than the first session did. Later turns follow the old
    answer, so they must be dropped with the reason `session_lost`."""

    turn: int
    """Index of the earlier turn (0 = the first)."""
    answer: TurnAnswer
    """The new answer to this turn, which replaces the stored one."""
    is_loss: bool
    """True if the session's failure caused the rebuild, False if a restart of the hub did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The session is lost. The episode must start again under a key with the next attempt, or end."""

    detail: str
    """Cause of the loss, for the operator."""
    is_loss: bool
    """True if the session failed, False if the hub closed it or was restarted."""


Answer = TurnAnswer | Diverged | Lost


def turns_digest(turns: Sequence[PlayedTurn]) -> bytes:
    """Return a digest of all token ids of the turns and their answers, and of how each turn ended."""
    digest = hashlib.blake2b(digest_size=16)
    for turn in turns:
        for ids in (turn.completion_ids, turn.observation_ids):
            digest.update(len(ids).to_bytes(8, "little") + np.ascontiguousarray(ids, dtype="<i4").tobytes())
        digest.update(turn.finish_reason.encode())
    return digest.digest()
