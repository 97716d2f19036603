"""Drawer that uses the hub's own device: the process that holds tenants' models also draws their samples."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

from echo_hub.run.directory import RunDirectory
from echo_hub.tenants.computing import ComputerHost
from echo_hub.tenants.drawing import DrawJob, DrawnPiece
from echo_hub.tenants.requests import Sample
from echo_hub.tenants.versions import is_of_tenant, version_directory
from echo_shared.process.child import ChildExited

WIDTH: Final = 256
"""Largest number of unfinished samples that the process gets at once. It computes as many of them together as its
memory holds."""
DEATHS: Final = 3
"""Number of process deaths during one job after which the job fails."""


class HubDrawer:
    """A `TenantDrawer`. If the process dies, unfinished samples are drawn again from their first token. They get the
    same tokens, because the seed is the same."""

    def __init__(self, host: ComputerHost, directory: RunDirectory) -> None:
        self._host = host
        self._directory = directory

    async def draw(self, job: DrawJob) -> AsyncIterator[DrawnPiece | Sample]:
        done: set[str] = set()
        told: dict[int, int] = {}
        deaths = 0
        while len(done) < len(job.sequence_ids):
            computer = await self._host.get()
            try:
                async for piece in computer.draw(job, self._adapter(job.policy_version)):
                    if isinstance(piece, Sample):
                        if piece.sequence_id not in done:
                            done.add(piece.sequence_id)
                            yield piece
                    elif piece.start >= told.get(piece.index, 0) and job.sequence_ids[piece.index] not in done:
                        told[piece.index] = piece.start + len(piece.token_ids)
                        yield piece
            except ChildExited:
                await self._host.lost(computer)
                deaths += 1
                if deaths == DEATHS:
                    raise
                continue
            return

    async def publish(self, policy_version: int, directory: Path) -> None:
        """Do nothing: the process reads the adapter from its directory when a job needs it."""

    async def withdraw(self, policy_version: int) -> None: ...

    def width(self) -> int:
        return WIDTH

    def state(self) -> str:
        return self._host.trouble

    def _adapter(self, policy_version: int) -> Path | None:
        if not policy_version:
            return None
        if is_of_tenant(policy_version):
            return version_directory(self._directory.root, policy_version)
        return self._directory.adapter(policy_version)
