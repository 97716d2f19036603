"""Which connected node holds which policy version, and how long each took from the announcement to having it.

All that is known comes from what nodes report, and counts from the hub's clock: `now` is any clock that only goes
forward, the same in every call. What a node holds is forgotten when it disconnects; it says so again when it is back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from echo_shared.messages import Fetched, Way

VERSIONS_REMEMBERED: Final = 16
"""Versions kept in mind, of those that a node holds and of those that were announced."""

ASSUMED_DELTA: Final = 0.35
"""Size of a delta, as a share of the keyframe's, before one of each was published."""

OLDER_PARENT: Final = 0.25
"""A delta grows by this share with every version that its parent is older."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """One version as it was announced."""

    policy_version: int
    adapter_bytes: int
    """Size of the decoded files."""
    payload_bytes: int
    """Size of what travels in place of the files."""
    carrier: Literal["keyframe", "delta"]
    way: Way | None
    """None when nobody was told of it, or only nodes that read it from this host's memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A node has verified an artefact that is published here."""

    node_id: str
    fetched: Fetched
    broadcast_s: float | None
    """Seconds from the announcement to the node's report; None for who was not connected then, has reported it before,
    or has fetched the base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far the newest announced version has come."""

    release: Release
    since_s: float
    """Seconds since the announcement; once every node has it, seconds until the last one had it."""
    num_told: int
    """Nodes connected at the announcement that have it, or are still there to get it."""
    seconds: tuple[float, ...]
    """Seconds until each node that has it had it, ascending."""
    share_arrived: float
    """Share of all bytes that these nodes are to get that they have reported; 0..1."""

    @property
    def under_way(self) -> bool:
        return len(self.seconds) < self.num_told


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributionStatus:
    """What people see of the dissemination, at one moment."""

    newest: Progress | None = None
    """Progress of the newest announced version."""
    newest_complete: int | None = None
    """The newest version that every node has that was told of it, or a newer one."""
    num_holding: int = 0
    """Connected nodes that hold the newest published version."""
    num_connected: int = 0
    uplink_bytes_s: float | None = None
    """The hub's uplink, as set or measured."""


@dataclass(slots=True, kw_only=True)
class _Spread:
    """One announced version on its way."""

    release: Release
    num_pieces: int
    announced_at: float
    waiting: set[str]
    """Nodes that were told of it and are still connected, and that have neither it nor a newer one."""
    away: set[str] = field(default_factory=set)
    """Nodes that were told of it and left before they had it; one that comes back is waited for again."""
    seconds: dict[str, float] = field(default_factory=dict)
    pieces: Counter[str] = field(default_factory=Counter)
    """Pieces that each node that waits has reported."""


def quantile(ascending: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` of them do not exceed (nearest rank); None of none."""
    return ascending[max(math.ceil(share * len(ascending)) - 1, 0)] if ascending else None


class Dissemination:
    """`parents_back`: a delta's parent is at most so many published versions older than itself."""

    def __init__(self, *, parents_back: int) -> None:
        self._parents_back = parents_back
        self._held: dict[str, set[int]] = {}
        """The versions that each connected node holds."""
        self._wanted: dict[str, set[int]] = {}
        """The versions that each connected node was offered, while it has neither them nor newer ones."""
        self._spreads: dict[int, _Spread] = {}
        self._packed: dict[str, float] = {}
        """The size of the newest carrier of each kind, as a share of the adapter's."""

    def node_joined(self, node_id: str, offered: int) -> None:
        """A node is connected (again), and is offered this version."""
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
        """All connected nodes are told of this version now."""
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
        """Seconds since the announcement; None for who was not told then, or has reported it before."""
        if node_id not in self._held:
            return None
        held = self._held[node_id]
        held.add(version)
        self._held[node_id] = set(sorted(held)[-VERSIONS_REMEMBERED:])
        self._wanted[node_id] = {wanted for wanted in self._wanted[node_id] if wanted > version}
        for older in self._spreads.values():
            if older.release.policy_version < version:  # The node has skipped it.
                older.waiting.discard(node_id)
        spread = self._spreads.get(version)
        if spread is None or node_id not in spread.waiting:
            return None
        spread.waiting.remove(node_id)
        spread.seconds[node_id] = now - spread.announced_at
        return spread.seconds[node_id]

    def lacks(self, node_id: str, version: int) -> None:
        """The node turns out not to hold this version."""
        self._held.get(node_id, set()).discard(version)

    def delta_parent(self, version: int, published: Collection[int]) -> int | None:
        """The version that a delta of `version` is best taken against: the fewest bytes for all connected nodes.

        Those that hold the parent take the delta, the others a keyframe. None = a keyframe for all. `published`: the
        versions that there are, any order.
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
        """The versions that a connected node may still be fetching."""
        return frozenset().union(*self._wanted.values())

    def keep(self, published: Collection[int]) -> None:
        """Only these versions can be fetched any more."""
        for wanted in self._wanted.values():
            wanted.intersection_update(published)

    def num_holding(self, version: int) -> int:
        """How many connected nodes hold this version."""
        return sum(version in held for held in self._held.values())

    def newest_complete(self) -> int | None:
        """The newest announced version that nodes have, and that none is waited for with; None before the first."""
        complete = (version for version, spread in self._spreads.items() if spread.seconds and not spread.waiting)
        return max(complete, default=None)

    def progress(self, now: float) -> Progress | None:
        """The progress of the newest announced version; None before the first."""
        if not self._spreads:
            return None
        spread = self._spreads[max(self._spreads)]
        num_told = len(spread.seconds) + len(spread.waiting)
        pieces = sum(min(spread.pieces[node_id] / spread.num_pieces, 1.0) for node_id in spread.waiting)
        return Progress(
            release=spread.release,
            since_s=now - spread.announced_at if spread.waiting else max(spread.seconds.values(), default=0.0),
            num_told=num_told,
            seconds=tuple(sorted(spread.seconds.values())),
            share_arrived=(len(spread.seconds) + pieces) / num_told if num_told else 1.0,
        )
