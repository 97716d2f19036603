"""The newest policy versions in shared memory, for nodes that run on the hub's own machine."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from functools import lru_cache
from pathlib import Path
from typing import Final

from echo_shared.artefacts.manifest import Manifest
from echo_shared.swarm.shared_memory import AVAILABLE, MemorySegment
from echo_shared.wire.messages import SharedMemory
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

log = logging.getLogger(__name__)

HELD_VERSIONS: Final = 2
"""Versions held: the newest version, and its predecessor for nodes that start reading late. A node that has started
reading can finish after its version is released."""


class HostMemory:
    """Copies versions into shared memory, for nodes on this machine. It uses no memory before such a node asks for an
    `address`. Call `close` at the end.
    """

    def __init__(self, *, enabled: bool) -> None:
        self._enabled = enabled and AVAILABLE
        self._has_readers = False
        self._segments: dict[int, MemorySegment] = {}

    async def hold(self, manifest: Manifest, directory: Path) -> None:
        """Copy this version from `directory` into shared memory, if a node on this machine has asked for an address.
        Tenants' versions are not copied: they would take the place of the run's."""
        if not self._has_readers or manifest.policy_version >= FIRST_TENANT_VERSION:
            return
        version = manifest.policy_version
        try:
            self._segments[version] = await asyncio.to_thread(MemorySegment.of, manifest, directory)
        except OSError as error:
            log.warning("Policy version %d is not held in memory; nodes here use the swarm: %s", version, error)
        for old in sorted(self._segments)[:-HELD_VERSIONS]:
            self._segments.pop(old).close()

    def address(self, version: int, *, node_ip: str) -> SharedMemory | None:
        """Return where a node at `node_ip` finds this version in shared memory. Return None if the node runs on another
        machine, or if the version is not in shared memory.
        """
        if not self._enabled or not _is_own_address(node_ip):
            return None
        self._has_readers = True
        segment = self._segments.get(version)
        return None if segment is None else segment.address

    def close(self) -> None:
        for segment in self._segments.values():
            segment.close()
        self._segments.clear()


@lru_cache(4_096)
def _is_own_address(ip: str) -> bool:
    """Return True if `ip` belongs to this machine: a socket can be bound only to a local address.

    The answer is cached. If the machine gains or loses an address later, the nodes there use the swarm.
    """
    family = socket.AF_INET6 if ipaddress.ip_address(ip).version == 6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((ip, 0))
    except OSError:
        return False
    return True
