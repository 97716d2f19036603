"""Connect the coordinator with the verifier: pass its checks on, and turn the answers into events."""

from __future__ import annotations

from echo_hub.core.accounting.events import CheckAbandoned, NumericsMeasured, RolloutChecked
from echo_hub.core.trust.evidence import Evidence
from echo_hub.driving.event_queue import EventQueue
from echo_hub.verify.drawn import NodeEvidence
from echo_hub.verify.verifier import Verifier


class Verifying:
    """Puts one event with the verifier's answer into the queue for each submitted rollout or rounding."""

    def __init__(self, verifier: Verifier, queue: EventQueue) -> None:
        self._verifier = verifier
        self._queue = queue
        self.seconds = 0.0
        """Processor or device seconds of all checks and measurements since the hub's start."""
        self.num_abandoned = 0

    @property
    def absence(self) -> str:
        return self._verifier.absence

    def submit(self, rollout_id: str, *, is_urgent: bool) -> None:
        self._verifier.submit(rollout_id, is_urgent=is_urgent)

    def measure(self, rounding: str, policy_version: int) -> None:
        self._verifier.measure(rounding, policy_version)

    def published(self) -> None:
        self._verifier.published()

    def hasten(self) -> None:
        self._verifier.hasten()

    async def run(self) -> None:
        """Check until cancelled. Rollouts that were submitted before `run` wait in the verifier's queue."""
        await self._verifier.run(self)

    async def checked(self, rollout_id: str, spans: tuple[NodeEvidence, ...], seconds: float) -> None:
        self.seconds += seconds
        await self._queue.put(RolloutChecked(rollout_id=rollout_id, spans=spans))

    async def measured(self, rounding: str, policy_version: int, evidence: Evidence | None, seconds: float) -> None:
        self.seconds += seconds
        await self._queue.put(NumericsMeasured(rounding=rounding, policy_version=policy_version, evidence=evidence))

    async def abandoned(self, rollout_id: str, why: str) -> None:
        self.num_abandoned += 1
        await self._queue.put(CheckAbandoned(rollout_id=rollout_id))
