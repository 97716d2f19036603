"""Connect the coordinator's checks with the verifier: actions in, events out."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from echo_hub.core.events import CheckAbandoned, NumericsMeasured, RolloutChecked
from echo_hub.core.trust.evidence import Evidence
from echo_hub.verify.drawn import NodeEvidence
from echo_hub.verify.verifier import Verifier

Finding = RolloutChecked | CheckAbandoned | NumericsMeasured
Report = Callable[[Finding], Awaitable[None]]


class Verifying:
    """Report one event for each submitted rollout or rounding."""

    def __init__(self, verifier: Verifier, *, report: Report) -> None:
        self._verifier = verifier
        self._report = report
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
        await self._verifier.run(self._checked, self._abandoned, self._measured)

    async def _checked(self, rollout_id: str, spans: tuple[NodeEvidence, ...], seconds: float) -> None:
        self.seconds += seconds
        await self._report(RolloutChecked(rollout_id=rollout_id, spans=spans))

    async def _measured(self, rounding: str, policy_version: int, evidence: Evidence | None, seconds: float) -> None:
        self.seconds += seconds
        await self._report(NumericsMeasured(rounding=rounding, policy_version=policy_version, evidence=evidence))

    async def _abandoned(self, rollout_id: str, _why: str) -> None:
        self.num_abandoned += 1
        await self._report(CheckAbandoned(rollout_id=rollout_id))
