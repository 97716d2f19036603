"""Detection of published versions that engines cannot use, by nodes' refusals and by the hub's own checks.

A node whose engine cannot use a version returns its leases and names the version. Version or node may be at fault. A
version is *withdrawn* while nodes of `LEAST_REFUSED` origins (invites or network addresses) have refused it and no node
has sampled with it. A withdrawn version is not leased, and the nodes that refused it are excused. A rollout sampled
with the version makes it usable again.

Once a proven node has reported about a version, only proven nodes count for it, because anyone can create any number of
new nodes. Nodes of one origin have one vote together.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final, NamedTuple

from echo_hub.core.nodes.node import Node

LEAST_REFUSED: Final = 2
"""Number of origins (invites or network addresses) whose nodes must refuse a version to withdraw it. The
smallest number that rules out a fault of one origin."""
MOST_VOICES: Final = 1_024
"""Maximum number of nodes whose reports are kept per version. Set by hand to bound the memory."""
BY_NODES: Final = "nodes of {count} invites or addresses cannot use it, and no node has sampled with it"


class _Voice(NamedTuple):
    origin: str
    is_established: bool
    has_drawn: bool


class Usability:
    """Nodes' reports about versions: sampled successfully, or refused as unusable."""

    def __init__(self, *, most_versions: int | None = None) -> None:
        """`most_versions`: number of versions whose reports are kept, those reported last. None: reports are kept until
        `forget_before` is called."""
        self._most_versions = most_versions
        self._voices: dict[int, dict[str, _Voice]] = {}
        self._withdrawn: dict[int, str] = {}

    @property
    def withdrawn(self) -> Mapping[int, str]:
        return MappingProxyType(self._withdrawn)

    def is_withdrawn(self, policy_version: int) -> bool:
        return policy_version in self._withdrawn

    def refused_by_hub(self, policy_version: int, reason: str) -> None:
        """Withdraw a version that the hub itself found unusable and did not publish."""
        self._withdrawn[policy_version] = reason

    def refused(self, policy_version: int, node: Node) -> tuple[str, ...]:
        """Note that the node's engine cannot use the version.

        Return the nodes whose return of leases counts as no failure. If this report withdraws the version, these are
        all nodes with a report about the version. If the version was withdrawn before, it is only this node; otherwise
        none. A repeated report excuses no node.
        """
        known = self._voices.get(policy_version, {}).get(node.node_id)
        if known is not None and not known.has_drawn:
            return ()
        was_withdrawn = policy_version in self._withdrawn
        self._hear(policy_version, node, has_drawn=False)
        if policy_version not in self._withdrawn:
            return ()
        return (node.node_id,) if was_withdrawn else tuple(self._voices[policy_version])

    def drew(self, policy_version: int, node: Node) -> bool:
        """Note that the node returned tokens sampled with the version. Return True if the version becomes usable
        again."""
        known = self._voices.get(policy_version, {}).get(node.node_id)
        if known is not None and known.has_drawn and known.is_established:
            return False
        was_withdrawn = policy_version in self._withdrawn
        self._hear(policy_version, node, has_drawn=True)
        return was_withdrawn and policy_version not in self._withdrawn

    def has_drawn(self, policy_version: int) -> bool:
        """Return True if a node has sampled with the version. Once a proven node has reported on it, only proven
        nodes count.
        """
        return any(voice.has_drawn for voice in _heard(self._voices.get(policy_version, {})))

    def forget_before(self, policy_version: int) -> None:
        """Forget reports about older versions, which can no longer be fetched."""
        for known in (self._voices, self._withdrawn):
            for version in [version for version in known if version < policy_version]:
                del known[version]

    def _hear(self, policy_version: int, node: Node, *, has_drawn: bool) -> None:
        voices = self._voices.setdefault(policy_version, {})
        if self._most_versions is not None and len(self._voices) > self._most_versions:
            oldest = next(iter(self._voices))
            del self._voices[oldest]
            self._withdrawn.pop(oldest, None)
        if node.quarantined or (node.node_id not in voices and len(voices) >= MOST_VOICES):
            return
        voices[node.node_id] = _Voice(node.origin or node.node_id, node.proven, has_drawn)
        heard = _heard(voices)
        refused = {voice.origin for voice in heard if not voice.has_drawn}
        if len(refused) >= LEAST_REFUSED and not any(voice.has_drawn for voice in heard):
            self._withdrawn[policy_version] = BY_NODES.format(count=len(refused))
        else:
            self._withdrawn.pop(policy_version, None)


def _heard(voices: Mapping[str, _Voice]) -> list[_Voice]:
    """Return the reports that count: those of proven nodes if there are any, else all."""
    return [voice for voice in voices.values() if voice.is_established] or list(voices.values())
