"""Where the coordinator's checks meet the process that computes rollouts again."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from echo_hub.core.events import CheckAbandoned, NumericsMeasured, RolloutChecked
from echo_hub.core.trust.evidence import Evidence
from echo_hub.verify.drawn import NodeEvidence
from echo_hub.verify.verifier import Verifier

Finding = RolloutChecked | CheckAbandoned | NumericsMeasured
Report = Callable[[Finding], Awaitable[None]]


class Verifying:
    """Every rollout that is submitted is answered for once, by an event for the coordinator."""

    def __init__(self, verifier: Verifier, *, report: Report) -> None:
        self._verifier = verifier
        self._report = report
        self.seconds = 0.0
        """Of processor or device, that checks have taken since the hub's start."""
        self.num_abandoned = 0

    @property
    def absence(self) -> str:
        """Why checks wait for a Ray cluster; empty = they do not."""
        return self._verifier.absence

    def submit(self, rollout_id: str, *, is_urgent: bool) -> None:
        """Never waits."""
        self._verifier.submit(rollout_id, is_urgent=is_urgent)

    def measure(self, rounding: str, policy_version: int) -> None:
        """Has it measured how coarsely engines with this rounding draw, before what is submitted later is checked."""
        self._verifier.measure(rounding, policy_version)

    def published(self) -> None:
        """A version is: what waits for company does not wait for many."""
        self._verifier.published()

    def hasten(self) -> None:
        """What waits for company is checked now."""
        self._verifier.hasten()

    async def run(self) -> None:
        """Works for ever; until then, what is submitted waits."""
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
