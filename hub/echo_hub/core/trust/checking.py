"""Checks by nodes: a node, the *checker*, recomputes a rollout of other nodes. This module chooses the checkers and
decides by their findings.

    wanted ──> first checker ──> acquits ──────────────────────> settled
                                 accuses ──> second checker
                                             agrees ───────────> settled, by the milder finding
                                             disagrees ──> third checker
                                                   two agree ──> settled by these two; the third is outvoted
                                                   otherwise, or without a checker ──> given up

A checker learns neither the claimed log-probabilities nor the seed, so it cannot invent a finding that acquits: such a
finding must name intervals of cumulative probability that contain the uniform numbers with which the tokens were drawn.
Nodes know these intervals only if they compute the rollout, or conspire with its sampler. An accusation can be
invented, so it counts only after a second, dissimilar node confirms it. One in ten settled rollouts (rollouts whose
check has a verdict) is checked by one more node, which cannot tell that it is an audit. This exposes checkers that lie,
and nodes that acquit each other.

Checkers are proven nodes, or new ones if no proven node may check the rollout, as in a run's first minutes. Samplers of
a rollout may not check it. Nor may nodes sharing an address or invite with a sampler or earlier checker. Nodes of
numerics classes (kinds of engine) that have not checked the rollout yet are preferred. Among equals the choice is
unpredictable. A restart forgets all checks here; unchecked rollouts are requested again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from heapq import heappop, heappush
from math import inf
from typing import Final

from echo_hub.core.accounting.effects import SendCheck
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import added, weigh
from echo_hub.core.trust.numerics import Honest, NumericsClass
from echo_hub.core.trust.pairs import PeerFinding, contradiction
from echo_hub.core.trust.rate import is_drawn
from echo_hub.core.trust.standing import Standing, Standings, StandingState
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

AUDITED: Final = 0.1
"""Share of rollouts with a verdict that one more node checks, as an audit of the checkers."""
LOOKED_AT: Final = 64
"""Maximum number of nodes that are compared to choose one checker."""
IN_VAIN: Final = 4
"""Number of rollouts without a free checker after which one search for checkers stops, because further rollouts will
hardly find one.
"""
MOST_ASKED: Final = 64
"""Maximum number of checks requested, and of timers handled, in one turn. The rest waits for the next turn."""

Span = tuple[str, Evidence, Honest]
"""Node that sampled a part of the rollout, evidence about the part's tokens, and the rounding scales to judge it by:
those of this node and of the checker together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckOutcome:
    """Outcome of a check that ended, or that was given up."""

    rollout_id: str
    spans: tuple[Span, ...] = ()
    """The accepted finding, by sampling node. Empty: no finding was accepted, or the check was an audit."""
    is_doubtful: bool = False
    """True if the check was given up although a checker had accused the rollout."""
    is_known: bool = False
    """True if this check was an audit: the rollout already had a verdict."""
    agreed: tuple[tuple[str, int], ...] = ()
    """Checkers whose finding was accepted, each with the number of tokens that it computed."""
    outvoted: tuple[str, ...] = ()
    """Checkers whose finding two agreeing checkers contradicted."""
    disproved: tuple[str, ...] = ()
    """Nodes that sampled the rollout, if the first checker acquitted it and is outvoted now: checker and samplers may
    conspire."""


@dataclass(slots=True, eq=False)
class _Checker:
    node_id: str
    room: int = 0
    policy_version: int = -1
    asked_for: set[str] = field(default_factory=set)
    pool: list[_Checker] | None = None
    """The list, `_proven` or `_new`, that holds this checker; None: the node may not check."""
    place: int = 0
    """Position of this checker in the list `pool`."""


@dataclass(slots=True, eq=False)
class _Opinion:
    node_id: str
    numerics: NumericsClass
    finding: PeerFinding


@dataclass(slots=True, eq=False)
class _Case:
    rollout_id: str
    drawers: tuple[str, ...]
    policy_version: int
    unwilling: tuple[str, ...] = ()
    """Nodes whose owners refuse the tenant of the rollout: they must not see its tokens."""
    opinions: list[_Opinion] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)
    asking: str | None = None
    due_at: float = inf
    """Time by which the checker that is asked now must answer."""
    until: float = inf
    """End of the search for a checker; afterwards the check is given up."""
    is_known: bool = False
    credited: set[str] = field(default_factory=set)

    @property
    def is_of_tenant(self) -> bool:
        """True if a tenant's adapter drew the rollout. The hub does not know which nodes have this adapter; a node that
        lacks it declines the check."""
        return self.policy_version >= FIRST_TENANT_VERSION


class Checking:
    """All checks that nodes make of each other's rollouts.

    `doubt`: evidence against a node, in nats, above which a finding counts as an accusation. `alarm`: evidence, in
    nats, from which two findings count as contradicting each other.
    """

    def __init__(
        self,
        *,
        secret: bytes,
        deadline_s: float,
        alarm: float,
        doubt: float,
        standings: Standings,
        out: Outbox,
    ) -> None:
        self._secret = secret
        self._deadline_s = deadline_s
        self._alarm = alarm
        self._doubt = doubt
        self._standings = standings
        self._out = out
        self._checkers: dict[str, _Checker] = {}
        self._proven: list[_Checker] = []
        """Connected proven nodes that offer checks and are trusted to check. `_new` holds the nodes that are still new,
        which check only if no proven node may."""
        self._new: list[_Checker] = []
        self._cases: dict[str, _Case] = {}
        self._waiting: OrderedDict[str, None] = OrderedDict()
        """Rollouts that wait for a checker."""
        self._untimed: list[str] = []
        self._times: list[tuple[float, str]] = []
        self._may_ask = False
        """True if something changed since the last search, so that some waiting rollout may find a checker now."""
        self.num_opinions = self.num_disagreements = self.num_outvoted = self.num_tokens = 0

    @property
    def num_checkers(self) -> int:
        """Return the number of connected nodes that offer checks."""
        return sum(checker.room > 0 for checker in self._checkers.values())

    @property
    def due_at(self) -> float:
        """Return the time of the next timer; 0 if the last turn left work; inf = none."""
        if self._may_ask or self._untimed:
            return 0.0
        return self._times[0][0] if self._times else inf

    # --- nodes

    def connected(self, node_id: str) -> None:
        if node_id not in self._checkers:
            self._checkers[node_id] = _Checker(node_id)

    def reported(self, node_id: str, room: int, policy_version: int | None) -> None:
        """Store how many rollouts the node checks at the same time, and its newest version."""
        checker = self._checkers.get(node_id)
        if checker is not None:
            newest = -1 if policy_version is None else policy_version
            self._may_ask = self._may_ask or (room, newest) != (checker.room, checker.policy_version)
            checker.room, checker.policy_version = room, newest
            self._put(checker, self._pool_of(checker))

    def changed(self, node_id: str) -> None:
        """Note that the node's trust standing changed, so that it may have gained or lost the right to check."""
        checker = self._checkers.get(node_id)
        if checker is not None:
            self._put(checker, self._pool_of(checker))

    def disconnected(self, node_id: str) -> None:
        """Remove a disconnected node. Other nodes are asked for the checks that it was doing."""
        checker = self._checkers.pop(node_id, None)
        if checker is not None:
            self._put(checker, None)
            for rollout_id in sorted(checker.asked_for):
                self._ask_again(self._cases[rollout_id])

    def _pool_of(self, checker: _Checker) -> list[_Checker] | None:
        standing = self._standings.of(checker.node_id)
        if not checker.room or not _may_check(standing):
            return None
        return self._proven if standing.is_proven else self._new

    def _put(self, checker: _Checker, pool: list[_Checker] | None) -> None:
        """Move the checker to another pool in O(1): the last checker fills its place."""
        if pool is checker.pool:
            return
        if checker.pool is not None:
            last = checker.pool.pop()
            if last is not checker:
                checker.pool[checker.place] = last
                last.place = checker.place
        checker.pool = pool
        if pool is not None:
            checker.place = len(pool)
            pool.append(checker)
            self._may_ask = True

    # --- rollouts

    def want(
        self, rollout_id: str, drawers: Iterable[str], policy_version: int, *, unwilling: tuple[str, ...] = ()
    ) -> None:
        """Have a rollout checked. `unwilling`: nodes that refuse the tenant's work, which the hub therefore does not
        ask."""
        self._cases[rollout_id] = _Case(rollout_id, tuple(drawers), policy_version, unwilling)
        self._untimed.append(rollout_id)
        self._wait(rollout_id)

    def forget(self, rollout_id: str) -> None:
        """Drop the check of a rollout, because the rollout cannot be checked."""
        case = self._cases.get(rollout_id)
        if case is not None:
            self._close(case)

    def returned(self, node_id: str, rollout_id: str, finding: PeerFinding | None) -> CheckOutcome | None:
        """Process the finding of a checker; `finding` None: it could not decide. Unrequested answers, and answers of
        nodes no longer trusted to check, do not count. Return the outcome once the check is decided."""
        case = self._cases.get(rollout_id)
        if case is None or case.asking != node_id:
            return None
        self._release(case)
        standing = self._standings.of(node_id)
        if finding is None or not _may_check(standing):
            self._ask_again(case)
            return None
        self.num_opinions += 1
        self.num_tokens += finding.num_tokens
        case.opinions.append(_Opinion(node_id, standing.numerics, finding))
        outcome = self._considered(case)
        if outcome is None:
            self._wait(rollout_id)
        if rollout_id in self._cases:
            case.until = inf
            self._untimed.append(rollout_id)
        return outcome

    def advance(self, now: float) -> list[CheckOutcome]:
        """Ask free checkers for the waiting rollouts. Return the outcomes of checks that were given up for lack of a
        checker."""
        outcomes = []
        for _ in range(MOST_ASKED):
            if not self._times or self._times[0][0] > now:
                break
            case = self._cases.get(heappop(self._times)[1])
            if case is None:
                continue
            if case.due_at <= now:
                self._ask_again(case)
            elif case.asking is None and case.until <= now:
                outcomes.append(self._given_up(case))
        for rollout_id in self._untimed:
            if (untimed := self._cases.get(rollout_id)) is not None:
                self._be_patient(untimed, now)
        self._untimed.clear()
        if self._may_ask:
            self._ask(now)
        return outcomes

    # --- asking

    def _be_patient(self, case: _Case, now: float) -> None:
        """Give the check `deadline_s` seconds to find a checker; `advance` gives the check up afterwards."""
        case.until = now + self._deadline_s
        heappush(self._times, (case.until, case.rollout_id))

    def _wait(self, rollout_id: str) -> None:
        self._waiting[rollout_id] = None
        self._waiting.move_to_end(rollout_id, last=False)
        self._may_ask = True

    def _ask_again(self, case: _Case) -> None:
        self._release(case)
        self._wait(case.rollout_id)
        case.until = inf
        self._untimed.append(case.rollout_id)

    def _release(self, case: _Case) -> None:
        """Take back the request to the checker that is asked at present."""
        checker = self._checkers.get(case.asking or "")
        if checker is not None:
            checker.asked_for.discard(case.rollout_id)
        case.asking, case.due_at = None, inf
        self._may_ask = True

    def _close(self, case: _Case) -> None:
        self._release(case)
        self._waiting.pop(case.rollout_id, None)
        del self._cases[case.rollout_id]

    def _ask(self, now: float) -> None:
        """Ask a checker for each waiting rollout. A rollout without a free checker moves to the end of the queue; after
        `IN_VAIN` such rollouts the search ends."""
        in_vain = num_asked = 0
        while in_vain < min(IN_VAIN, len(self._waiting)) and num_asked < MOST_ASKED:
            rollout_id = next(iter(self._waiting))
            case = self._cases[rollout_id]
            checker = self._choice(case)
            if checker is None:
                self._waiting.move_to_end(rollout_id)
                in_vain += 1
                continue
            del self._waiting[rollout_id]
            num_asked += 1
            case.asked.add(checker.node_id)
            case.asking, case.due_at = checker.node_id, now + self._deadline_s
            checker.asked_for.add(rollout_id)
            heappush(self._times, (case.due_at, rollout_id))
            self._out.act(SendCheck(node_id=checker.node_id, rollout_id=rollout_id, deadline_s=self._deadline_s))
        self._may_ask = num_asked == MOST_ASKED

    def _choice(self, case: _Case) -> _Checker | None:
        """Return the next checker of this rollout; None: no node that may check it is free."""
        involved = {*case.drawers, *case.asked}
        kin = frozenset().union(*(self._standings.of(node_id).kin for node_id in involved))
        before = [opinion.numerics for opinion in case.opinions]
        drawn_by = {self._standings.of(node_id).numerics for node_id in case.drawers}
        start = int.from_bytes(self._lot(case.rollout_id, ""))
        for pool in (self._proven, self._new):
            is_there, best = False, None
            for place in range(start, start + min(LOOKED_AT, len(pool))):
                checker = pool[place % len(pool)]
                node_id = checker.node_id
                if node_id in involved or node_id in case.unwilling:
                    continue
                if not (case.is_of_tenant or checker.policy_version >= case.policy_version):
                    continue
                standing = self._standings.of(node_id)
                if kin & standing.kin:
                    continue
                is_there = True
                if len(checker.asked_for) >= checker.room:
                    continue
                numerics = standing.numerics
                rank = before.count(numerics), numerics in drawn_by, self._lot(case.rollout_id, node_id)
                if best is None or rank < best[0]:
                    best = rank, checker
            if is_there:
                return None if best is None else best[1]
        return None

    def _lot(self, rollout_id: str, node_id: str) -> bytes:
        return blake2b(f"{rollout_id} {node_id}".encode(), key=self._secret[:64], digest_size=8).digest()

    # --- answers

    def _considered(self, case: _Case) -> CheckOutcome | None:
        """Decide the check by the findings so far; None: one more checker is needed."""
        *earlier, newest = case.opinions
        alike = [one for one in earlier if self._agree(one, newest)]
        if alike:
            return self._settled(case, [*alike, newest])
        if not earlier:
            return None if self._accuses(case, newest) else self._settled(case, [newest])
        if len(earlier) == 1:
            self.num_disagreements += 1
            return None
        return self._settled(case, earlier) if self._agree(*earlier) else self._given_up(case)

    def _settled(self, case: _Case, standing_by: list[_Opinion]) -> CheckOutcome:
        """Decide the check by the agreeing findings in `standing_by`; the one that weighs least against the samplers
        counts.

        Checkers with other findings are outvoted. As an audit, one more node checks one in ten decided rollouts.
        """
        mildest = min(standing_by, key=lambda opinion: self._weight(case, opinion))
        outvoted = [one for one in case.opinions if one not in standing_by]
        self.num_outvoted += len(outvoted)
        agreed = [one for one in standing_by if one.node_id not in case.credited]
        case.credited.update(one.node_id for one in agreed)
        outcome = CheckOutcome(
            rollout_id=case.rollout_id,
            spans=() if case.is_known else self._spans(mildest),
            is_known=case.is_known,
            agreed=tuple((one.node_id, one.finding.num_tokens) for one in agreed),
            outvoted=tuple(one.node_id for one in outvoted),
            disproved=case.drawers if case.is_known and case.opinions[0] in outvoted else (),
        )
        if not case.is_known and is_drawn(self._secret, f"audit {case.rollout_id}", AUDITED):
            case.is_known = True
            self._wait(case.rollout_id)
        else:
            self._close(case)
        return outcome

    def _given_up(self, case: _Case) -> CheckOutcome:
        self._close(case)
        is_doubtful = bool(case.opinions) and not case.is_known
        return CheckOutcome(rollout_id=case.rollout_id, is_doubtful=is_doubtful, is_known=case.is_known)

    def _spans(self, opinion: _Opinion) -> tuple[Span, ...]:
        standings = self._standings
        found_by = standings.numerics.honest(opinion.numerics)
        return tuple(
            (node_id, evidence, standings.numerics.honest(standings.of(node_id).numerics).together(found_by))
            for node_id, evidence in opinion.finding.spans
        )

    def _weight(self, case: _Case, opinion: _Opinion) -> float:
        """Return the largest sum of evidence, in nats, against any sampler of the rollout after this finding."""
        return max(
            max(added(self._standings.of(node_id).sums, weigh(evidence, honest)))
            for node_id, evidence, honest in self._spans(opinion)
        )

    def _accuses(self, case: _Case, opinion: _Opinion) -> bool:
        return self._weight(case, opinion) > self._doubt

    def _agree(self, one: _Opinion, other: _Opinion) -> bool:
        honest = self._standings.numerics.honest(one.numerics).together(self._standings.numerics.honest(other.numerics))
        return contradiction(one.finding, other.finding, honest) < self._alarm


def _may_check(standing: Standing) -> bool:
    return standing.state in (StandingState.PROVEN, StandingState.NEW)
