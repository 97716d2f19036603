"""Under which names hub and gateways speak at the broker."""

from __future__ import annotations

from dataclasses import dataclass


def beacon(hub_id: str) -> str:
    """Where a hub says that it is there, and which run it serves."""
    return f"echo.hub.{hub_id}"


@dataclass(frozen=True, slots=True)
class Subjects:
    """Of one run."""

    run_id: str

    @property
    def stream(self) -> str:
        """The JetStream stream of what nodes have sent and the hub has not committed."""
        return f"echo-{self.run_id}"

    @property
    def sent(self) -> str:
        """The stream's one subject."""
        return f"echo.run.{self.run_id}.sent"

    @property
    def asked(self) -> str:
        """What gateways ask the hub, or let it know, now or never."""
        return f"echo.run.{self.run_id}.asked"

    def told(self, gateway_id: str) -> str:
        """What the hub has for one gateway and its nodes."""
        return f"echo.run.{self.run_id}.told.{gateway_id}"
