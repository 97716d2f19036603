"""Connect the coordinator's checks with the verifier: actions in, events out."""

from __future__ import annotations

from echo_hub.core.accounting.events import CheckAbandoned, NumericsMeasured, RolloutChecked
from echo_hub.core.trust.evidence import Evidence
from echo_hub.driving.event_queue import EventQueue
from echo_hub.verify.drawn import NodeEvidence
from echo_hub.verify.verifier import Verifier


class Verifying:
    """Report one event for each submitted rollout or rounding."""

    def __init__(self, verifier: Verifier, queue: EventQueue) -> None:
        self._verifier = verifier
        self._queue = queue
        self.seconds = 0.0
        """Processor or device seconds of all checks since the hub's start."""
        self.num_abandoned = 0

    @property
    def absence(self) -> str:
        """Reason why checks wait for the Ray cluster; empty: they do not."""
        return self._verifier.absence

    def submit(self, rollout_id: str, *, is_urgent: bool) -> None:
        """Queue a check of a rollout. Never waits."""
        self._verifier.submit(rollout_id, is_urgent=is_urgent)

    def measure(self, rounding: str, policy_version: int) -> None:
        """Queue a measurement of this rounding, before the checks of rollouts that are submitted later."""
        self._verifier.measure(rounding, policy_version)

    def published(self) -> None:
        """Count one more published version: rollouts wait for a fuller batch for a few versions only."""
        self._verifier.published()

    def hasten(self) -> None:
        """Send the waiting rollouts now."""
        self._verifier.hasten()

    async def run(self) -> None:
        """Check forever; rollouts that are submitted before wait."""
        await self._verifier.run(self)

    async def checked(self, rollout_id: str, spans: tuple[NodeEvidence, ...], seconds: float) -> None:
        """Report the evidence of a check."""
        self.seconds += seconds
        await self._queue.put(RolloutChecked(rollout_id=rollout_id, spans=spans))

    async def measured(self, rounding: str, policy_version: int, evidence: Evidence | None, seconds: float) -> None:
        """Report the evidence of a measurement."""
        self.seconds += seconds
        await self._queue.put(NumericsMeasured(rounding=rounding, policy_version=policy_version, evidence=evidence))

    async def abandoned(self, rollout_id: str, why: str) -> None:
        """Report that a rollout cannot be checked."""
        self.num_abandoned += 1
        await self._queue.put(CheckAbandoned(rollout_id=rollout_id))
