"""What the node says to its hub, and when: at once, after the next Welcome, or not at all."""

from __future__ import annotations

from collections.abc import Iterable

from echo_node.core.effects import Effect, ForgetLease, Send
from echo_shared.messages import FromNode, LeaseReturned, NodeStatus


class HubTalk:
    """Every method returns what is to be done for it; nothing is sent while there is no connection."""

    def __init__(self, unsaid: Iterable[FromNode]) -> None:
        """`unsaid`: for the first Welcome, as `say` keeps it."""
        self.connected = False
        self._unsaid = list(unsaid)
        self._heartbeat_s = 1.0
        self._reported: tuple[object, ...] = ()
        self._reported_at = 0.0

    def welcomed(self, heartbeat_s: float) -> list[Effect]:
        """Says what has waited. A status is due, whatever the last one said."""
        self.connected = True
        self._heartbeat_s = heartbeat_s
        self._reported = ()
        unsaid, self._unsaid = self._unsaid, []
        return [effect for message in unsaid for effect in self.send(message)]

    def disconnected(self) -> None:
        """Nothing is sent until the next Welcome."""
        self.connected = False

    def say(self, message: FromNode) -> list[Effect]:
        """Now, or after the next Welcome."""
        if self.connected:
            return self.send(message)
        self._unsaid.append(message)
        return []

    def send(self, message: FromNode) -> list[Effect]:
        """Now, or never. A lease whose return has been sent is forgotten on disk too."""
        if not self.connected:
            return []
        sent: list[Effect] = [Send(message=message)]
        return [*sent, ForgetLease(lease_id=message.lease_id)] if isinstance(message, LeaseReturned) else sent

    def report(self, status: NodeStatus, now: float) -> list[Effect]:
        """Sends the status when it is news, and as the heartbeat."""
        news = (status.activity, status.capacity, status.policy_version, status.precision, status.checks)
        if not self.connected or (news == self._reported and now - self._reported_at < self._heartbeat_s):
            return []
        self._reported = news
        self._reported_at = now
        return self.send(status)
