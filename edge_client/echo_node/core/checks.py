"""Checks: completions of other nodes that this node recomputes for the hub, from the check's lease to the answer.

Each lease gets one answer, if the node is connected before the deadline. The answer holds the engine's result, or
nothing if the node cannot compute it. A completion that was given to the engine counts towards `MAX_CHECKS` until the
engine has answered, even after the lease ended, so that a hub cannot overload the engine.

Checks are not stored: the hub asks another node for a lost one. A check during which the engine died is not retried.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from echo_node.core.effects import Effect, ScoreCompletion, SendMessage
from echo_shared.sampling.scoring import Scored, ScoreRequest
from echo_shared.wire.messages import MAX_CHECKS, CheckLease, CheckResult

_NOTHING: Final = np.zeros(0, np.float32)


@dataclass(slots=True, eq=False)
class _Held:
    lease: CheckLease
    due_at: float

    @property
    def versions(self) -> set[int]:
        return {span.policy_version for span in self.lease.versions}


class Checks:
    """State of all checks. Methods return effects, which `echo_node.shell` carries out."""

    def __init__(self) -> None:
        self._held: dict[str, _Held] = {}
        self._in_hand: dict[str, str] = {}
        """Rollout id -> device of the engine that recomputes its completion."""

    @property
    def versions(self) -> frozenset[int]:
        return frozenset(version for held in self._held.values() for version in held.versions)

    def take(self, lease: CheckLease, now: float, *, can: bool, on_disk: frozenset[int]) -> list[Effect]:
        """Accept a check's lease. Decline it if the node cannot recompute now (`can` is False), lacks one of the
        lease's versions on disk, or already has MAX_CHECKS checks.
        """
        held = _Held(lease, now + lease.deadline_s)
        if lease.rollout_id in self._held:
            return []
        if not can or len(self._held.keys() | self._in_hand.keys()) >= MAX_CHECKS or not held.versions <= on_disk:
            return [_cannot(lease.rollout_id)]
        self._held[lease.rollout_id] = held
        return []

    def start(self, engines: Mapping[str, frozenset[int]]) -> list[Effect]:
        """Give the waiting checks to the engines that can recompute. `engines`: their loaded versions by device."""
        effects: list[Effect] = []
        for rollout_id, held in self._held.items():
            able = [device for device, loaded in engines.items() if held.versions <= loaded]
            if able and rollout_id not in self._in_hand:
                busy = Counter(self._in_hand.values())
                device = min(able, key=lambda one: busy[one])
                self._in_hand[rollout_id] = device
                effects.append(ScoreCompletion(request=_request(held.lease), device=device))
        return effects

    def scored(self, scored: Scored) -> list[Effect]:
        self._in_hand.pop(scored.rollout_id, None)
        if self._held.pop(scored.rollout_id, None) is None:
            return []
        result = CheckResult(rollout_id=scored.rollout_id, below=scored.below, logprobs=scored.logprobs)
        return [SendMessage(message=result)]

    def give_up(self) -> list[Effect]:
        return self._decline(list(self._held))

    def engine_lost(self, device: str) -> list[Effect]:
        """Decline the checks that the lost engine was computing. The others wait for an engine."""
        lost = [rollout_id for rollout_id, place in self._in_hand.items() if place == device]
        for rollout_id in lost:
            del self._in_hand[rollout_id]
        return self._decline([rollout_id for rollout_id in lost if rollout_id in self._held])

    def _decline(self, rollout_ids: list[str]) -> list[Effect]:
        for rollout_id in rollout_ids:
            del self._held[rollout_id]
        return [_cannot(rollout_id) for rollout_id in rollout_ids]

    def overdue(self, now: float) -> None:
        """Drop the checks whose deadline has passed: the hub no longer waits for their answers."""
        self._held = {rollout_id: held for rollout_id, held in self._held.items() if now <= held.due_at}


def _cannot(rollout_id: str) -> Effect:
    return SendMessage(message=CheckResult(rollout_id=rollout_id, below=_NOTHING, logprobs=_NOTHING))


def _request(lease: CheckLease) -> ScoreRequest:
    return ScoreRequest(
        rollout_id=lease.rollout_id,
        prompt_ids=lease.prompt_ids,
        completion_ids=lease.completion_ids,
        versions=tuple((span.policy_version, span.num_tokens) for span in lease.versions),
        temperature=lease.temperature,
    )
