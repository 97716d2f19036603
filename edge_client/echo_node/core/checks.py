"""The completions of other nodes that this one is asked to compute again, from the lease to the answer.

Every lease is answered once, while there is a connection and somebody waits: with what the engine finds, or with
nothing at once where the node cannot tell. What the engine has in hand counts until it is done, whatever has become of
its lease: no hub can give the engine more than `MAX_CHECKS` at a time. They are kept nowhere: who loses one has nothing
to make up for, the hub asks another node. What the engine died over is not tried again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from echo_node.core.effects import Effect, ScoreCompletion, Send
from echo_shared.messages import MAX_CHECKS, CheckLease, CheckResult
from echo_shared.scoring import Scored, ScoreRequest

_NOTHING: Final = np.zeros(0, np.float32)


@dataclass(slots=True, eq=False)
class _Held:
    lease: CheckLease
    due_at: float

    @property
    def versions(self) -> set[int]:
        return {span.policy_version for span in self.lease.versions}


class Checks:
    """Bookkeeping alone: what to send and what to have scored is returned."""

    def __init__(self) -> None:
        self.can_score = False
        """There is an engine, and it can."""
        self._held: dict[str, _Held] = {}
        self._in_hand: set[str] = set()
        """What the engine was given and has not answered."""

    @property
    def versions(self) -> frozenset[int]:
        """Policy versions that are needed."""
        return frozenset(version for held in self._held.values() for version in held.versions)

    def take(self, lease: CheckLease, now: float, *, can: bool, on_disk: frozenset[int]) -> list[Effect]:
        """Holds a lease, or declines it: where the node cannot score now, has not its versions, or has enough."""
        held = _Held(lease, now + lease.deadline_s)
        if lease.rollout_id in self._held:
            return []
        if not can or len(self._held.keys() | self._in_hand) >= MAX_CHECKS or not held.versions <= on_disk:
            return [_cannot(lease.rollout_id)]
        self._held[lease.rollout_id] = held
        return []

    def start(self, loaded: frozenset[int]) -> list[Effect]:
        """What the engine is to score now: its versions are there."""
        effects: list[Effect] = []
        for rollout_id, held in self._held.items() if self.can_score else ():
            if rollout_id not in self._in_hand and held.versions <= loaded:
                self._in_hand.add(rollout_id)
                effects.append(ScoreCompletion(request=_request(held.lease)))
        return effects

    def scored(self, scored: Scored) -> list[Effect]:
        """The engine's answer to one of them."""
        self._in_hand.discard(scored.rollout_id)
        if self._held.pop(scored.rollout_id, None) is None:
            return []
        result = CheckResult(rollout_id=scored.rollout_id, below=scored.below, logprobs=scored.logprobs)
        return [Send(message=result)]

    def give_up(self) -> list[Effect]:
        """All of them."""
        return self._decline(list(self._held))

    def engine_lost(self) -> list[Effect]:
        """What it had in hand is given up; the others wait for the next one."""
        self.can_score = False
        lost, self._in_hand = self._in_hand, set()
        return self._decline([rollout_id for rollout_id in self._held if rollout_id in lost])

    def _decline(self, rollout_ids: list[str]) -> list[Effect]:
        for rollout_id in rollout_ids:
            del self._held[rollout_id]
        return [_cannot(rollout_id) for rollout_id in rollout_ids]

    def overdue(self, now: float) -> None:
        """Nobody waits any more for what is past its deadline."""
        self._held = {rollout_id: held for rollout_id, held in self._held.items() if now <= held.due_at}


def _cannot(rollout_id: str) -> Effect:
    return Send(message=CheckResult(rollout_id=rollout_id, below=_NOTHING, logprobs=_NOTHING))


def _request(lease: CheckLease) -> ScoreRequest:
    return ScoreRequest(
        rollout_id=lease.rollout_id,
        prompt_ids=lease.prompt_ids,
        completion_ids=lease.completion_ids,
        versions=tuple((span.policy_version, span.num_tokens) for span in lease.versions),
        temperature=lease.temperature,
    )
