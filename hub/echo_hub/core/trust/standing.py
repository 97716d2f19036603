"""Standings of nodes: how far the hub trusts each, and why.

    new ──(enough verified)──> proven ──(doubt, or a hint)──> suspect ──(enough verified)──> proven
     └────────────┴───────────────(convicted)────────────────────┴──> quarantined ──(pardoned)──> new

An operator may set a node that is not in quarantine to proven, and a proven node to new.

All rollouts of new and suspect nodes are checked before the learner trains on them.

The standing of a node that was ever checked is kept forever. Keys cost nothing, so the standing of an unchecked node is
kept only while the node is connected, and for the `REMEMBERED` unchecked nodes that left last.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from echo_hub.core.trust.evidence import NO_EVIDENCE, Evidence
from echo_hub.core.trust.judging import NOTHING, Alternative, Sums
from echo_hub.core.trust.numerics import NOT_SAID, Numerics, NumericsClass
from echo_hub.core.trust.shopping import UsualRank

WINDOW: Final = 2_048
"""Minimum number of a node's newest tokens whose evidence is kept as its recent evidence."""
REMEMBERED: Final = 65_536
"""Number of departed unchecked nodes whose standings are kept, because their rollouts may still be under check."""


class StandingState(StrEnum):
    NEW = "new"
    PROVEN = "proven"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"


class Decision(StrEnum):
    """Kinds of trust decisions about a node, as recorded in the log."""

    QUARANTINED = "quarantined"
    RELEASED = "released"
    """The hub released the node from quarantine: a cause other than the node explains its failures."""
    PARDONED = "pardoned"
    """The operator released the node from quarantine."""
    TRUSTED = "trusted"
    """The operator declared that the node counts as proven."""
    DISTRUSTED = "distrusted"
    """The operator demanded that the node prove itself again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingRow:
    """One node's standing as a row of the database."""

    node_id: str
    state: StandingState = StandingState.NEW
    numerics: NumericsClass = NOT_SAID
    num_verified: int = 0
    """Number of rollouts verified in a row; a long rollout counts for several (`rate.worth`)."""
    sums: Sums = NOTHING
    """Evidence against the node in nats, by alternative: see `judging`."""
    proof: float = 0.0
    """Evidence from the node's sampled tokens that it is honest, in nats, at most 0: the lower, the more surely
    honest."""
    shown: Evidence = NO_EVIDENCE
    """Evidence of the verifier's checks that the node has passed since it became proven, without curves."""
    num_checked: int = 0
    num_failed: int = 0
    checked_at: float | None = None
    """Time of the last check of one of the node's rollouts."""
    reason: str = ""
    """Why the node is suspect, quarantined or new again, for people."""
    since: float = 0.0
    """Time since which the node has had this standing."""


@dataclass(frozen=True, slots=True)
class Grounds:
    """Checks that contributed to one sum of evidence against a node: all checks since this sum was last zero."""

    num_rollouts: int = 0
    shown: Evidence = NO_EVIDENCE
    """Evidence of the `num_rollouts` checks, without curves."""
    is_partial: bool = False
    """True if the sum also contains checks older than the hub's start, which are missing here."""


_NO_GROUNDS: Final = Grounds()


@dataclass(slots=True, eq=False)
class Standing:
    """One node's standing in memory. Only `Trust` and its `Decisions` change it."""

    node_id: str
    state: StandingState = StandingState.NEW
    numerics: NumericsClass = NOT_SAID
    num_verified: int = 0
    sums: Sums = NOTHING
    proof: float = 0.0
    shown: Evidence = NO_EVIDENCE
    num_checked: int = 0
    num_failed: int = 0
    checked_at: float | None = None
    reason: str = ""
    since: float = 0.0
    share: float = 1.0
    """Share of the node's rollouts that the hub checks, 0 .. 1."""
    hints_from: int = 0
    """Number of checks of the node from which another hint of the learner makes the node suspect."""
    taught: Evidence = NO_EVIDENCE
    """Evidence that the node has contributed to the rounding scale of its numerics class (kind of engine) since the
    hub's start."""
    recent: Evidence = NO_EVIDENCE
    """Evidence of the node's latest tokens: `WINDOW` to 2 · `WINDOW` of them, whatever the verdicts were. The database
    does not store this."""
    grounds: tuple[Grounds, ...] = (_NO_GROUNDS,) * len(NOTHING)
    """The checks behind each of `sums`. The database does not store this."""
    usual_rank: UsualRank = field(default_factory=UsualRank)
    """Mean rank of the rewards of the node's rollouts (`shopping`). The database does not store this."""
    kin: frozenset[str] = frozenset()
    """The node's network address, invite and proven owner, if known. Nodes that share one of them count as nodes of one
    owner."""

    @classmethod
    def of(cls, row: StandingRow) -> Standing:
        """Return the standing stored in a row. The caller sets `share`, which is not stored."""
        grounds = tuple(Grounds(is_partial=True) if nats else _NO_GROUNDS for nats in row.sums)
        return cls(**{name: getattr(row, name) for name in row.__slots__}, grounds=grounds)

    @property
    def row(self) -> StandingRow:
        return StandingRow(**{name: getattr(self, name) for name in StandingRow.__slots__})

    @property
    def has_shown_anything(self) -> bool:
        """True if this standing differs from that of an unknown node."""
        return self.num_checked > 0 or self.hints_from > 0 or self.state is not StandingState.NEW

    @property
    def is_proven(self) -> bool:
        """True if the node's rollouts need not wait for their checks."""
        return self.state is StandingState.PROVEN

    @property
    def is_quarantined(self) -> bool:
        return self.state is StandingState.QUARANTINED

    def weigh(self, sums: Sums, evidence: Evidence) -> None:
        """Set the sums of evidence after a check that found `evidence`. Sums from `SHOPPED` on (tokens chosen by
        reward) stay unchanged."""
        self._weigh(slice(0, Alternative.SHOPPED), sums, evidence.counts)

    def weigh_rewards(self, sums: Sums, counts: Evidence) -> None:
        """Set the sums from `SHOPPED` on (tokens chosen by reward) after a checked rollout got its reward. `counts`:
        the rollout's evidence without curves."""
        self._weigh(slice(Alternative.SHOPPED, None), sums, counts)

    def _weigh(self, places: slice, sums: Sums, counts: Evidence) -> None:
        changed, grounds = list(self.sums), list(self.grounds)
        changed[places] = sums[places]
        grounds[places] = [
            Grounds(before.num_rollouts + 1, before.shown + counts, before.is_partial) if nats else _NO_GROUNDS
            for nats, before in zip(sums[places], self.grounds[places], strict=True)
        ]
        self.sums, self.grounds = tuple(changed), tuple(grounds)

    def acquit(self) -> None:
        self.sums, self.grounds = NOTHING, (_NO_GROUNDS,) * len(NOTHING)

    def show(self, evidence: Evidence) -> None:
        """Add the evidence of a check to `recent`, which is halved when it covers 2 · `WINDOW` tokens."""
        self.recent += evidence
        if self.recent.num_tokens >= 2 * WINDOW:
            self.recent = self.recent.halved

    def begin_again(self, state: StandingState, reason: str, now: float) -> None:
        """Enter a state in which the node must prove itself again: earlier verified rollouts no longer count."""
        if state is not self.state:
            self.since = now
        self.state, self.reason = state, reason
        self.num_verified, self.proof, self.share = 0, 0.0, 1.0


class Standings:
    """Trust standings by node id. `numerics`: the known classes of engines."""

    def __init__(self, numerics: Numerics) -> None:
        self.numerics = numerics
        self._standings: dict[str, Standing] = {}
        self._left: OrderedDict[str, None] = OrderedDict()
        """Nodes that left before any check, the longest ago first."""

    def __len__(self) -> int:
        return len(self._standings)

    def restore(self, row: StandingRow) -> Standing:
        """Restore a standing that the database has from before the hub's restart."""
        standing = self._standings[row.node_id] = Standing.of(row)
        standing.numerics = self.numerics.known(row.numerics)
        return standing

    def get(self, node_id: str) -> Standing | None:
        return self._standings.get(node_id)

    def of_class(self, numerics: NumericsClass) -> list[Standing]:
        """Return the standings of all nodes of a class. O(nodes); called seldom."""
        return [standing for standing in self._standings.values() if standing.numerics == numerics]

    def of(self, node_id: str) -> Standing:
        """Return a node's standing; an unknown node gets a new one."""
        standing = self._standings.get(node_id)
        if standing is None:
            standing = self._standings[node_id] = Standing(node_id, numerics=self.numerics.known(NOT_SAID))
        return standing

    def connected(self, node_id: str, kin: Iterable[str]) -> Standing:
        """Note that a node has connected. `kin`: its network address, its invite and its proven owner. Nodes that share
        one of them count as nodes of one owner."""
        self._left.pop(node_id, None)
        standing = self.of(node_id)
        standing.kin = frozenset(filter(None, kin))
        return standing

    def disconnected(self, node_id: str) -> None:
        """Keep the standing of a node that left, because it may return. Of unchecked nodes, only the last `REMEMBERED`
        stay."""
        standing = self._standings.get(node_id)
        if standing is not None and not standing.has_shown_anything:
            self._left[node_id] = None
            if len(self._left) > REMEMBERED:
                oldest, _ = self._left.popitem(last=False)
                if not self._standings[oldest].has_shown_anything:
                    del self._standings[oldest]
