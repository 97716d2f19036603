"""Connect the coordinator with the verifier: pass its checks on, and turn the answers into events."""

from __future__ import annotations

from echo_hub.core.accounting.events import CheckAbandoned, NumericsMeasured, RolloutChecked
from echo_hub.core.trust.evidence import Evidence
from echo_hub.driving.event_queue import EventQueue
from echo_hub.verify.drawn import NodeEvidence
from echo_hub.verify.verifier import Verifier


class Verifying:
    """Puts one event into the queue for each submitted rollout or rounding."""

    def __init__(self, verifier: Verifier, queue: EventQueue) -> None:
        self._verifier = verifier
        self._queue = queue
        self.seconds = 0.0
        """Processor or device seconds of all checks and measurements since the hub's start."""
        self.num_abandoned = 0

    @property
    def absence(self) -> str:
        """Why checks wait for the Ray cluster; empty if they do not."""
        return self._verifier.absence

    def submit(self, rollout_id: str, *, is_urgent: bool) -> None:
        """Queue the check of a rollout. Never waits."""
        self._verifier.submit(rollout_id, is_urgent=is_urgent)

    def measure(self, rounding: str, policy_version: int) -> None:
        """Queue the measurement of a rounding. It comes before all checks that have not started."""
        self._verifier.measure(rounding, policy_version)

    def published(self) -> None:
        """Count one more published version, because rollouts wait for a fuller batch only for a few versions."""
        self._verifier.published()

    def hasten(self) -> None:
        """Send the waiting rollouts without waiting for a fuller batch."""
        self._verifier.hasten()

    async def run(self) -> None:
        """Check until cancelled. Rollouts may be submitted before; they wait."""
        await self._verifier.run(self)

    async def checked(self, rollout_id: str, spans: tuple[NodeEvidence, ...], seconds: float) -> None:
        """Put the evidence of a check into the event queue."""
        self.seconds += seconds
        await self._queue.put(RolloutChecked(rollout_id=rollout_id, spans=spans))

    async def measured(self, rounding: str, policy_version: int, evidence: Evidence | None, seconds: float) -> None:
        """Put the evidence of a measurement into the event queue."""
        self.seconds += seconds
        await self._queue.put(NumericsMeasured(rounding=rounding, policy_version=policy_version, evidence=evidence))

    async def abandoned(self, rollout_id: str, why: str) -> None:
        """Put into the event queue that a rollout was not checked."""
        self.num_abandoned += 1
        await self._queue.put(CheckAbandoned(rollout_id=rollout_id))
