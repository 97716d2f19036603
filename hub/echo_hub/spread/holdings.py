"""Policy versions held by each connected node, and the time each node needed from announcement to arrival.

All knowledge comes from nodes' reports, timed by the hub's clock: `now` is any monotonic clock, the same in all calls.
A disconnected node's holdings are forgotten. The node reports them again after a reconnect.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from echo_shared.wire.messages import Fetched, Way

VERSIONS_REMEMBERED: Final = 16
"""Number of versions remembered, both per node and among the announced ones."""

ASSUMED_DELTA: Final = 0.35
"""Assumed size of a delta relative to a keyframe, until both were published."""

OLDER_PARENT: Final = 0.25
"""Assumed growth of a delta per version that its parent is older, as a share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One announced version."""

    policy_version: int
    adapter_bytes: int
    """Size of the decoded files."""
    payload_bytes: int
    """Size of the transferred payload."""
    carrier: Literal["keyframe", "delta"]
    way: Way | None
    """None if all told nodes, if any, read the version from this host's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A node's verification of an artefact published here."""

    node_id: str
    fetched: Fetched
    broadcast_s: float | None
    """Seconds from the announcement to the node's report.

    None for late joiners, repeated reports and the base model.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionProgress:
    """Distribution progress of the newest announced version."""

    release: Release
    since_s: float
    """Seconds since the announcement, until the last arrival."""
    num_told: int
    """Nodes connected at the announcement, without those that left before getting the version."""
    seconds: tuple[float, ...]
    """Seconds until arrival at each node that has it, ascending."""
    share_arrived: float
    """Share of the nodes' total bytes that has arrived, by their reports; 0..1."""

    @property
    def under_way(self) -> bool:
        return len(self.seconds) < self.num_told


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionStatus:
    """Distribution status of one moment, for people."""

    newest: VersionProgress | None = None
    """Progress of the newest announced version."""
    newest_complete: int | None = None
    """Newest version that no told node lacks."""
    num_holding: int = 0
    """Connected nodes that hold the newest published version."""
    num_connected: int = 0
    uplink_bytes_s: float | None = None
    """The hub's uplink, as set or measured."""


@dataclass(slots=True, kw_only=True)
class _Spread:
    """Distribution of one announced version."""

    release: Release
    num_pieces: int
    announced_at: float
    waiting: set[str]
    """Told, connected nodes without this version or a newer one."""
    away: set[str] = field(default_factory=set)
    """Told nodes that left before they had it. A returning node is awaited again."""
    seconds: dict[str, float] = field(default_factory=dict)
    pieces: Counter[str] = field(default_factory=Counter)
    """Pieces reported by each awaited node."""


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """Return the smallest value not exceeded by at least `share` of the values (nearest rank); None if there are
    none."""
    return ascending[max(math.ceil(share * len(ascending)) - 1, 0)] if ascending else None


class Dissemination:
    """Holdings and progress of all nodes. `parents_back`: maximum age of a delta's parent, in published versions."""

    def __init__(self, *, parents_back: int) -> None:
        self._parents_back = parents_back
        self._held: dict[str, set[int]] = {}
        """Versions held by each connected node."""
        self._wanted: dict[str, set[int]] = {}
        """Offered versions by connected node, as far as newer than the node's newest fetched version."""
        self._spreads: dict[int, _Spread] = {}
        self._packed: dict[str, float] = {}
        """Size of the newest carrier of each kind, relative to the adapter."""

    def node_joined(self, node_id: str, offered: int) -> None:
        """Note that a node connected (again) and was offered this version."""
        self.node_left(node_id)
        self._held[node_id] = set()
        self._wanted[node_id] = {offered}
        spread = self._spreads.get(offered)
        if spread is not None and node_id in spread.away:
            spread.away.remove(node_id)
            spread.waiting.add(node_id)

    def node_left(self, node_id: str) -> None:
        self._held.pop(node_id, None)
        self._wanted.pop(node_id, None)
        for spread in self._spreads.values():
            if node_id in spread.waiting:
                spread.waiting.remove(node_id)
                spread.away.add(node_id)

    def announced(self, release: Release, *, num_pieces: int, now: float) -> None:
        """Note the announcement of a version to all connected nodes."""
        version = release.policy_version
        self._spreads[version] = _Spread(
            release=release,
            num_pieces=num_pieces,
            announced_at=now,
            waiting={node_id for node_id, held in self._held.items() if version not in held},
        )
        for wanted in self._wanted.values():
            wanted.add(version)
        if release.adapter_bytes:
            self._packed[release.carrier] = release.payload_bytes / release.adapter_bytes
        for old in sorted(self._spreads)[:-VERSIONS_REMEMBERED]:
            del self._spreads[old]

    def pieces_arrived(self, node_id: str, version: int, number: int) -> None:
        spread = self._spreads.get(version)
        if spread is not None and node_id in spread.waiting:
            spread.pieces[node_id] += number

    def fetched(self, node_id: str, version: int, now: float) -> float | None:
        """Note that the node has the version.

        Return the seconds since the announcement; None for nodes not told then and for repeated reports.
        """
        if node_id not in self._held:
            return None
        held = self._held[node_id]
        held.add(version)
        self._held[node_id] = set(sorted(held)[-VERSIONS_REMEMBERED:])
        self._wanted[node_id] = {wanted for wanted in self._wanted[node_id] if wanted > version}
        for older in self._spreads.values():
            if older.release.policy_version < version:  # The node has skipped this version.
                older.waiting.discard(node_id)
        spread = self._spreads.get(version)
        if spread is None or node_id not in spread.waiting:
            return None
        spread.waiting.remove(node_id)
        spread.seconds[node_id] = now - spread.announced_at
        return spread.seconds[node_id]

    def lacks(self, node_id: str, version: int) -> None:
        """Note that the node does not hold this version after all."""
        self._held.get(node_id, set()).discard(version)

    def delta_parent(self, version: int, published: Collection[int]) -> int | None:
        """Return the parent version of a delta that costs the fewest total bytes over all connected nodes; None:
        keyframe for all.

        Nodes that hold the parent take the delta, the others a keyframe. `published`: existing versions, in any order.
        """
        sizes = [self._packed.get(carrier, 0.0) for carrier in ("delta", "keyframe")]
        delta = sizes[0] / sizes[1] if all(sizes) else ASSUMED_DELTA
        best, least = None, float(len(self._held))
        candidates = sorted((v for v in published if 0 < v < version), reverse=True)[: self._parents_back]
        for back, parent in enumerate(candidates):
            holding = self.num_holding(parent)
            keyframes = holding * delta * (1 + OLDER_PARENT * back) + len(self._held) - holding
            if keyframes < least:
                best, least = parent, keyframes
        return best

    def wanted(self) -> frozenset[int]:
        """Return all versions that a connected node may still be fetching."""
        return frozenset().union(*self._wanted.values())

    def keep(self, published: Collection[int]) -> None:
        """Note that only these versions can still be fetched."""
        for wanted in self._wanted.values():
            wanted.intersection_update(published)

    def num_holding(self, version: int) -> int:
        """Return how many connected nodes hold this version."""
        return sum(version in held for held in self._held.values())

    def newest_complete(self) -> int | None:
        """Return the newest announced version that nodes have and that no told node lacks; None before the first."""
        complete = (version for version, spread in self._spreads.items() if spread.seconds and not spread.waiting)
        return max(complete, default=None)

    def progress(self, now: float) -> VersionProgress | None:
        """Return the progress of the newest announced version; None before the first."""
        if not self._spreads:
            return None
        spread = self._spreads[max(self._spreads)]
        num_told = len(spread.seconds) + len(spread.waiting)
        pieces = sum(min(spread.pieces[node_id] / spread.num_pieces, 1.0) for node_id in spread.waiting)
        return VersionProgress(
            release=spread.release,
            since_s=now - spread.announced_at if spread.waiting else max(spread.seconds.values(), default=0.0),
            num_told=num_told,
            seconds=tuple(sorted(spread.seconds.values())),
            share_arrived=(len(spread.seconds) + pieces) / num_told if num_told else 1.0,
        )
