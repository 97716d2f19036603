"""Which published versions cannot be used: what nodes say of each, and what the hub itself finds.

A node whose engine cannot use a version gives its leases back and names the version. The version may be at fault, or
the node. A version is *withdrawn* while `LEAST_REFUSED` unlike nodes have refused it and no node has drawn by it: it is
leased to nobody, and the nodes that refused it are not to blame. A rollout that was drawn by it makes it usable again.

Of each version only established nodes count, as soon as one has said anything of it: keys that cost nothing have no
vote. Nodes of one origin are one voice.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from echo_hub.core.nodes.node import Node

LEAST_REFUSED: Final = 2
MOST_VOICES: Final = 1_024
"""Nodes that are heard of each version."""
BY_NODES: Final = "{count} unlike nodes cannot use it, and none has drawn by it"


class _Voice(NamedTuple):
    origin: str
    is_established: bool
    has_drawn: bool


class Usability:
    """Told what nodes say of the versions that they can fetch."""

    def __init__(self) -> None:
        self._voices: dict[int, dict[str, _Voice]] = {}
        self._withdrawn: dict[int, str] = {}

    @property
    def withdrawn(self) -> Mapping[int, str]:
        """The versions that are leased to nobody, with the reason."""
        return MappingProxyType(self._withdrawn)

    def is_withdrawn(self, policy_version: int) -> bool:
        """Return True if no lease may name this version."""
        return policy_version in self._withdrawn

    def refused_by_hub(self, policy_version: int, reason: str) -> None:
        """The hub has not published it."""
        self._withdrawn[policy_version] = reason

    def refused(self, policy_version: int, node: Node) -> tuple[str, ...]:
        """Note that the node's engine cannot use the version. Return the nodes that this frees of blame: none while the
        version is not withdrawn, or if the node has said so before."""
        known = self._voices.get(policy_version, {}).get(node.node_id)
        if known is not None and not known.has_drawn:
            return ()
        was_withdrawn = policy_version in self._withdrawn
        self._hear(policy_version, node, has_drawn=False)
        if policy_version not in self._withdrawn:
            return ()
        return (node.node_id,) if was_withdrawn else tuple(self._voices[policy_version])

    def drew(self, policy_version: int, node: Node) -> bool:
        """Note that the node has returned what it drew by the version. Return True if that makes it usable again."""
        known = self._voices.get(policy_version, {}).get(node.node_id)
        if known is not None and known.has_drawn and known.is_established:
            return False
        was_withdrawn = policy_version in self._withdrawn
        self._hear(policy_version, node, has_drawn=True)
        return was_withdrawn and policy_version not in self._withdrawn

    def forget_before(self, policy_version: int) -> None:
        """Older versions can be fetched no more."""
        for known in (self._voices, self._withdrawn):
            for version in [version for version in known if version < policy_version]:
                del known[version]

    def _hear(self, policy_version: int, node: Node, *, has_drawn: bool) -> None:
        voices = self._voices.setdefault(policy_version, {})
        if node.quarantined or (node.node_id not in voices and len(voices) >= MOST_VOICES):
            return
        voices[node.node_id] = _Voice(node.origin or node.node_id, node.proven, has_drawn)
        heard = [voice for voice in voices.values() if voice.is_established] or list(voices.values())
        refused = {voice.origin for voice in heard if not voice.has_drawn}
        if len(refused) >= LEAST_REFUSED and not any(voice.has_drawn for voice in heard):
            self._withdrawn[policy_version] = BY_NODES.format(count=len(refused))
        else:
            self._withdrawn.pop(policy_version, None)
