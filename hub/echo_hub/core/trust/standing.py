"""What the hub thinks of one node, and why.

    new ──(enough verified)──> proven ──(doubt, or a hint)──> suspect ──(enough verified)──> proven
     └────────────┴───────────────(convicted)────────────────────┴──> quarantined ──(pardoned)──> new

An operator may take a node for proven that is not in quarantine, and have one prove itself anew.

All of a new or suspect node's rollouts are checked before anybody trains on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from echo_hub.core.trust.evidence import NO_EVIDENCE, Evidence
from echo_hub.core.trust.judging import NOTHING, Alternative, Sums
from echo_hub.core.trust.numerics import NOT_SAID, NumericsClass
from echo_hub.core.trust.shopping import UsualRank

WINDOW: Final = 2_048
"""Tokens."""


class StandingState(StrEnum):
    """How a node stands."""

    NEW = "new"
    PROVEN = "proven"
    SUSPECT = "suspect"
    QUARANTINED = "quarantined"


class Decision(StrEnum):
    """What the log of decisions has."""

    QUARANTINED = "quarantined"
    RELEASED = "released"
    """By the hub itself: what it was condemned for proved to be no fault of its own."""
    PARDONED = "pardoned"
    """By the operator."""
    TRUSTED = "trusted"
    """By the operator: it is taken for proven."""
    DISTRUSTED = "distrusted"
    """By the operator: it proves itself anew."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandingRow:
    """One node's standing, as it is stored."""

    node_id: str
    state: StandingState = StandingState.NEW
    numerics: NumericsClass = NOT_SAID
    num_verified: int = 0
    """In a row, up to now; long ones count for several (`rate.worth`)."""
    sums: Sums = NOTHING
    """What speaks against it, nats: see `judging`."""
    proof: float = 0.0
    """What speaks for it, at most 0."""
    shown: Evidence = NO_EVIDENCE
    """What its checks have shown since it stands so, without curves."""
    num_checked: int = 0
    num_failed: int = 0
    checked_at: float | None = None
    """When a rollout of it was last checked."""
    reason: str = ""
    """Why it is suspect or quarantined, for people."""
    since: float = 0.0
    """Since when it stands so."""


@dataclass(frozen=True, slots=True)
class Grounds:
    """What one sum against a node consists of: all that was checked since it was zero."""

    num_rollouts: int = 0
    shown: Evidence = NO_EVIDENCE
    """Without curves."""
    is_partial: bool = False
    """There is more, from before the hub's start."""


_NO_GROUNDS: Final = Grounds()


@dataclass(slots=True, eq=False)
class Standing:
    """One node's standing as it changes; `Trust` alone changes it."""

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
    """Of its rollouts that are checked."""
    hints_from: int = 0
    """After so many checks the learner's hints are heeded."""
    taught: Evidence = NO_EVIDENCE
    """What its class has learned of it since the hub's start."""
    recent: Evidence = NO_EVIDENCE
    """What it has shown lately, whatever its verdicts were: of twice `WINDOW` tokens half are forgotten. Not stored."""
    grounds: tuple[Grounds, ...] = (_NO_GROUNDS,) * len(NOTHING)
    """Of each of `sums`. Not stored."""
    usual_rank: UsualRank = field(default_factory=UsualRank)
    """Of its rewards. Not stored."""
    kin: frozenset[str] = frozenset()
    """What nodes of one owner have in common: an address, the invite by which they came."""

    @classmethod
    def of(cls, row: StandingRow) -> Standing:
        """From before a restart; its share is still to be set."""
        grounds = tuple(Grounds(is_partial=True) if nats else _NO_GROUNDS for nats in row.sums)
        return cls(**{name: getattr(row, name) for name in row.__slots__}, grounds=grounds)

    @property
    def row(self) -> StandingRow:
        return StandingRow(**{name: getattr(self, name) for name in StandingRow.__slots__})

    @property
    def has_shown_anything(self) -> bool:
        """More is thought of it than of a node that nobody knows."""
        return self.num_checked > 0 or self.hints_from > 0 or self.state is not StandingState.NEW

    @property
    def is_proven(self) -> bool:
        """Its rollouts need not wait for their checks."""
        return self.state is StandingState.PROVEN

    @property
    def is_quarantined(self) -> bool:
        return self.state is StandingState.QUARANTINED

    def weigh(self, sums: Sums, evidence: Evidence) -> None:
        """A check has led to these sums by this evidence; what is `SHOPPED` stays as it is."""
        self._weigh(slice(0, Alternative.SHOPPED), sums, evidence.counts)

    def weigh_rewards(self, sums: Sums, counts: Evidence) -> None:
        """A checked rollout's reward has led to these sums; only what is `SHOPPED` changes. `counts`: its evidence
        without curves."""
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
        """Nothing speaks against it any more."""
        self.sums, self.grounds = NOTHING, (_NO_GROUNDS,) * len(NOTHING)

    def show(self, evidence: Evidence) -> None:
        """A check of it has found this."""
        self.recent += evidence
        if self.recent.num_tokens >= 2 * WINDOW:
            self.recent = self.recent.halved

    def begin_again(self, state: StandingState, reason: str, now: float) -> None:
        """All that it has shown so far counts no more."""
        if state is not self.state:
            self.since = now
        self.state, self.reason = state, reason
        self.num_verified, self.proof, self.share = 0, 0.0, 1.0
