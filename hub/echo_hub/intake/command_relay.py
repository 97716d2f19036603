"""Pass the command of a fleet's owner on to the owner's connected nodes, and collect the nodes' reports. The hub does
not interpret commands or reports."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from echo_hub.net.live_nodes import NodeSender
from echo_shared.errors import RefusedError
from echo_shared.wire.messages import FleetCommand, FleetReport, RefusalCode
from echo_shared.wire.owner_commands import id_of

REPORTS_S: Final = 5.0
"""Longest time to wait for the nodes' reports, in seconds. A node that is told to pause stops its engine before it
reports."""


@dataclass(slots=True, kw_only=True)
class _Asked:
    """An owner's command that nodes have not all answered by a report."""

    missing: set[str]
    """Nodes that have not reported yet."""
    reports: dict[str, FleetReport] = field(default_factory=dict)
    complete: asyncio.Event = field(default_factory=asyncio.Event)


class CommandRelay:
    """Commands on their way to nodes. `reported` takes the nodes' reports."""

    def __init__(self, connections: NodeSender) -> None:
        self._connections = connections
        self._asked: dict[bytes, _Asked] = {}

    async def ask(self, command: FleetCommand, node_ids: Collection[str]) -> Mapping[str, FleetReport]:
        """Send the command to these nodes. Return the reports by node, after `REPORTS_S` seconds at the latest.

        Raises RefusedError if the same command is under way already.
        """
        command_id = id_of(command)
        if command_id in self._asked:
            raise RefusedError("This command is under way already.", do="Wait a moment.", code=RefusalCode.TOO_SOON)
        asked = self._asked[command_id] = _Asked(missing=set(node_ids))
        try:
            asked.missing -= {node_id for node_id in node_ids if not self._connections.send(node_id, command)}
            if asked.missing:
                with suppress(TimeoutError):
                    async with asyncio.timeout(REPORTS_S):
                        await asked.complete.wait()
        finally:
            del self._asked[command_id]
        return asked.reports

    def reported(self, node_id: str, report: FleetReport) -> None:
        """Store a node's report. A report for which no call of `ask` waits is dropped."""
        asked = self._asked.get(report.command_id)
        if asked is None or node_id not in asked.missing:
            return
        asked.missing.remove(node_id)
        asked.reports[node_id] = report
        if not asked.missing:
            asked.complete.set()
