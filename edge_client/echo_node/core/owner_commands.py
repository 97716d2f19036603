"""Which of the owner's commands, received through the hub, the node obeys. No I/O.

The hub can hold a command back, repeat it, or send it to another node. So the node obeys a command only if it names
this node and this hub, is new, and was sent within the last `MOST_AGE_S` seconds, after the node's start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from echo_node.core.clocks import ClockReading
from echo_shared.errors import RemoteProtocolError
from echo_shared.wire.messages import FleetCommand
from echo_shared.wire.owner_commands import OwnerCommand, read_command

MOST_AGE_S: Final = 300.0
"""Maximum difference between the sender's clock and the node's, in seconds, in either direction: the clocks of home
computers agree within a minute or two.
"""
MOST_SENDERS: Final = 256
"""Maximum number of senders whose newest command is remembered. After that, commands of further senders are refused."""


@dataclass(slots=True, kw_only=True)
class OwnerCommands:
    """The commands of one owner to one node, received through one hub."""

    node_id: str
    owner_key: bytes
    hub_key: bytes
    started_s: float
    """Start of the node, by the monotonic clock of `ClockReading.running`: the time of day may be set later."""
    _newest: dict[str, float] = field(default_factory=dict)
    """Time of the newest obeyed command by sender."""

    def take(self, said: FleetCommand, now: ClockReading) -> OwnerCommand:
        """Return the command, if the node must obey it. Raises RemoteProtocolError with the reason if not."""
        command = read_command(said, self.owner_key)
        if command.hub_key != self.hub_key.hex() or (command.to and self.node_id not in command.to):
            raise RemoteProtocolError("The command is for another node or hub.")
        age_s = now.wall - command.sent_at
        if abs(age_s) > MOST_AGE_S:
            raise RemoteProtocolError(
                "The command is too old, or the clocks of the two machines differ.",
                got=f"sent {age_s:.0f} s ago by this node's clock",
                do="Compare the clocks, then send the command again.",
            )
        if age_s > now.running - self.started_s:
            raise RemoteProtocolError("The command is older than this node's start.", do="Send the command again.")
        if command.sent_at <= self._newest.get(command.sender, 0.0):
            raise RemoteProtocolError("The node has had this command before.")
        if len(self._newest) >= MOST_SENDERS and command.sender not in self._newest:
            raise RemoteProtocolError("Too many machines send commands to this node.", got=f"{MOST_SENDERS}")
        self._newest[command.sender] = command.sent_at
        return command
