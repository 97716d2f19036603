"""Messages from the node to its hub: sent at once, after the next Welcome, or dropped."""

from __future__ import annotations

from collections.abc import Iterable

from echo_node.core.effects import Effect, ForgetLease, SendMessage
from echo_shared.wire.messages import FromNode, LeaseReturned, NodeStatus


class HubTalk:
    """Connection to the hub, and the messages that wait for it. Methods return the effects to carry out. Nothing is
    sent without a connection.
    """

    def __init__(self, unsaid: Iterable[FromNode]) -> None:
        """`unsaid`: messages that wait for the first Welcome, as if given to `say` before it."""
        self.connected = False
        self._unsaid = list(unsaid)
        self._heartbeat_s = 1.0
        self._reported: tuple[object, ...] = ()
        self._reported_at = 0.0

    def welcomed(self, heartbeat_s: float) -> list[Effect]:
        """Send the waiting messages. The next `report` sends a status in any case."""
        self.connected = True
        self._heartbeat_s = heartbeat_s
        self._reported = ()
        unsaid, self._unsaid = self._unsaid, []
        return [effect for message in unsaid for effect in self.send(message)]

    def disconnected(self) -> None:
        """Send nothing until the next Welcome."""
        self.connected = False

    def say(self, message: FromNode) -> list[Effect]:
        """Send now, or after the next Welcome."""
        if self.connected:
            return self.send(message)
        self._unsaid.append(message)
        return []

    def send(self, message: FromNode) -> list[Effect]:
        """Send now; drop the message without a connection. When a LeaseReturned is sent, also remove its lease from
        disk.
        """
        if not self.connected:
            return []
        sent: list[Effect] = [SendMessage(message=message)]
        return [*sent, ForgetLease(lease_id=message.lease_id)] if isinstance(message, LeaseReturned) else sent

    def report(self, status: NodeStatus, now: float) -> list[Effect]:
        """Send the status if it has changed, or as a heartbeat."""
        news = (status.activity, status.capacity, status.policy_version, status.precision, status.checks)
        if not self.connected or (news == self._reported and now - self._reported_at < self._heartbeat_s):
            return []
        self._reported = news
        self._reported_at = now
        return self.send(status)
