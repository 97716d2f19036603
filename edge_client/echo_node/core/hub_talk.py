"""Messages from the node to its hub: sent at once, after the next Welcome, or dropped."""

from __future__ import annotations

from collections.abc import Iterable

from echo_node.core.effects import Effect, ForgetLease, SendMessage
from echo_shared.wire.messages import FromNode, LeaseReturned, NodeStatus


class HubTalk:
    """Sends messages while the hub is connected, and keeps some of them otherwise. Methods return effects, which
    `echo_node.shell` carries out.
    """

    def __init__(self, unsaid: Iterable[FromNode]) -> None:
        """`unsaid`: messages to send after the first Welcome."""
        self.connected = False
        self._unsaid = list(unsaid)
        self._heartbeat_s = 1.0
        self._reported: tuple[object, ...] = ()
        self._reported_at = 0.0

    def welcomed(self, heartbeat_s: float) -> list[Effect]:
        """Send the messages that waited for the hub's Welcome. The next `report` then sends a status, even an unchanged
        one.
        """
        self.connected = True
        self._heartbeat_s = heartbeat_s
        self._reported = ()
        unsaid, self._unsaid = self._unsaid, []
        return [effect for message in unsaid for effect in self.send(message)]

    def disconnected(self) -> None:
        self.connected = False

    def say(self, message: FromNode) -> list[Effect]:
        """Send the message now, or after the next Welcome."""
        if self.connected:
            return self.send(message)
        self._unsaid.append(message)
        return []

    def send(self, message: FromNode) -> list[Effect]:
        """Send the message now, or drop it if the hub is not connected. Once a LeaseReturned is sent, its lease is also
        removed from disk.
        """
        if not self.connected:
            return []
        sent: list[Effect] = [SendMessage(message=message)]
        return [*sent, ForgetLease(lease_id=message.lease_id)] if isinstance(message, LeaseReturned) else sent

    def report(self, status: NodeStatus, now: float) -> list[Effect]:
        """Send the node's status if it has changed, or if a heartbeat is due."""
        news = (status.activity, status.capacity, status.policy_version, status.precision, status.checks)
        if not self.connected or (news == self._reported and now - self._reported_at < self._heartbeat_s):
            return []
        self._reported = news
        self._reported_at = now
        return self.send(status)
