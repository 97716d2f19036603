"""Policy versions held by each connected node, and the seconds from a version's announcement until each node had it.

All of this comes from nodes' reports, timed by the hub: `now` is any monotonic clock, the same in all calls. What a
disconnected node holds is forgotten. The node reports them again after a reconnect.
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
"""Assumed size of a delta (difference to an older version) relative to a complete keyframe, until both kinds were
published."""

OLDER_PARENT: Final = 0.25
"""Assumed growth of a delta's size for each further version by which its parent is older, relative to a delta on the
newest possible parent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    policy_version: int
    adapter_bytes: int
    """Size in bytes of the version's adapter files after decoding."""
    payload_bytes: int
    """Size of the keyframe or delta that a node receives."""
    carrier: Literal["keyframe", "delta"]
    way: Way | None
    """How the version was distributed; None if all nodes read the version from this host's memory, without a
    transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A node has received and verified a version that this hub published."""

    node_id: str
    fetched: Fetched
    broadcast_s: float | None
    """Seconds from the announcement to the node's report.

    None for late joiners, repeated reports and the base model.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionProgress:
    release: Release
    since_s: float
    """Seconds from the announcement until now; once no node is awaited, until the last arrival."""
    num_told: int
    """Number of nodes connected at the announcement, minus nodes that left without the version."""
    seconds: tuple[float, ...]
    """Seconds until arrival at each node that has the version, ascending."""
    share_arrived: float
    """Share of this version's bytes that has arrived at the `num_told` nodes, by their reports; 0..1."""

    @property
    def under_way(self) -> bool:
        return len(self.seconds) < self.num_told


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionStatus:
    """Distribution status of one moment, for people."""

    newest: VersionProgress | None = None
    newest_complete: int | None = None
    """Newest version that every node which was connected at its announcement holds by now."""
    num_holding: int = 0
    """Connected nodes that hold the newest published version."""
    num_connected: int = 0
    uplink_bytes_s: float | None = None
    """Bytes per second of the hub's uplink, as set or measured; None = unknown."""


@dataclass(slots=True, kw_only=True)
class _Spread:
    release: Release
    num_pieces: int
    announced_at: float
    waiting: set[str]
    """Connected nodes told of this version that still lack it and any newer version."""
    away: set[str] = field(default_factory=set)
    """Nodes told of this version that left without it. A node that returns is moved back to `waiting`."""
    seconds: dict[str, float] = field(default_factory=dict)
    pieces: Counter[str] = field(default_factory=Counter)
    """Number of pieces that each waiting node has reported."""


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """Return the quantile by nearest rank: the smallest value not exceeded by a share of at least `share` of the
    values. None if there are none."""
    return ascending[max(math.ceil(share * len(ascending)) - 1, 0)] if ascending else None


class Dissemination:
    """Which node holds which version, and how far the distribution has come. `parents_back`: number of newest published
    versions that may be a delta's parent."""

    def __init__(self, *, parents_back: int) -> None:
        self._parents_back = parents_back
        self._held: dict[str, set[int]] = {}
        self._wanted: dict[str, set[int]] = {}
        """Versions offered to each connected node that are newer than the newest one it has fetched."""
        self._spreads: dict[int, _Spread] = {}
        self._packed: dict[str, float] = {}
        """Size of the newest keyframe and of the newest delta, relative to the decoded adapter."""

    def node_joined(self, node_id: str, offered: int) -> None:
        """Record that a node connected (for the first time or again) and was offered this version."""
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
        """Record that the node has the version.

        Return the seconds since the announcement; Return None for nodes without the announcement, and for repeated
        reports.
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
        """Correct a wrong record: the node lacks this version."""
        self._held.get(node_id, set()).discard(version)

    def delta_parent(self, version: int, published: Collection[int]) -> int | None:
        """Return the version that a delta should be based on, so that all connected nodes together receive the fewest
        bytes; None: send a keyframe to all.

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
        """Keep only the versions in `published` as versions that nodes want, because nodes can no longer fetch the
        others."""
        for wanted in self._wanted.values():
            wanted.intersection_update(published)

    def num_holding(self, version: int) -> int:
        return sum(version in held for held in self._held.values())

    def newest_complete(self) -> int | None:
        """Return the newest announced version that at least one node has and that no connected node told of it lacks;
        None before the first."""
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
