"""Names of the NATS subjects and streams through which the hub and its gateways communicate."""

from __future__ import annotations

from dataclasses import dataclass


def beacon(hub_id: str) -> str:
    """Return the subject on which a hub announces itself and its run."""
    return f"echo.hub.{hub_id}"


@dataclass(frozen=True, slots=True)
class Subjects:
    run_id: str

    @property
    def stream(self) -> str:
        """Name of the JetStream stream. It holds the nodes' messages whose effects the hub has not committed yet."""
        return f"echo-{self.run_id}"

    @property
    def sent(self) -> str:
        """Subject under which gateways store the nodes' messages in JetStream."""
        return f"echo.run.{self.run_id}.sent"

    @property
    def asked(self) -> str:
        """Subject of requests and notices from gateways to the hub. JetStream does not store them."""
        return f"echo.run.{self.run_id}.asked"

    def told(self, gateway_id: str) -> str:
        """Return the subject of messages from the hub to one gateway and its nodes."""
        return f"echo.run.{self.run_id}.told.{gateway_id}"
