"""Choice of *active* nodes, and the reasons sent to nodes without work.

A *gift* is a node that costs nothing. Gifts are always active; the gift that got work longest ago is served first. A
*priced* node costs money while it is active. The hub activates the priced nodes with the cheapest rollouts: just enough
to cover the part of the learner's demand that gifts do not cover, times a safety margin (`choice`). All other priced
nodes are on standby: they still get new versions and finish their leases, but get no new leases.

    enter   nodes are activated once the active ones return `HYSTERESIS` (5 %) less than demand times margin: enough
            nodes at once to reach it again
    leave   a node is sent to standby if the margin holds without it, and if it has been active for `dwell_s`
    change  nodes are replaced if another set of nodes costs less by `HYSTERESIS` or more. The new nodes work alongside
            the old ones until they are settled (below), if the spending cap allows both
    cap     the total price of all active nodes never exceeds `spend_cap_per_hour`

A node without any result has no known speed. If the measured nodes do not suffice, all unmeasured nodes within the
spending cap are tried: they become active. While priced nodes work, one unmeasured node per `TRIED_SHARE` active ones
is tried, because it may be cheaper. If gifts suffice, none is tried. A trial without results ends after `TRIAL_S`, and
the wait for the next one doubles. Before the first trained step the demand is unknown, so only the cap limits trials.

A node is *too slow* if its rollouts arrive too late for the steps that may use them. Its speed may change, so every
`TURN_S` it gets a *turn*: a lease of one rollout of the youngest group. Another node may take the same rollout, so no
step waits for the slow node. Gifts that are too slow get turns regularly. Too slow priced nodes get turns only while on
trial, because one slow result may be one hang. Unproven nodes get turns too if steps are too short to wait for their
first rollouts.

A node's results count at once towards the demand. Other nodes are sent to standby only because of *settled* nodes:
those that have worked for `dwell_s` without late rollouts. A node that hangs is settled only `HANG_S` later, and twice
as long after each further hang. So a node that looks fast and cheap but stalls costs a few seconds once.

Most events cause no computation here. Each call of `advance` examines at most `SLICE` nodes; a round over all nodes
takes a few seconds. A choice is one pass over arrays of priced nodes, at most once a second, and changes at most
`CHANGES` nodes. Rounds and choices become rarer with many priced nodes. For 100,000 priced nodes, measured cost is
about 1.5 ms per slice and 40 ms per choice (every 5 s): 4 % of a processor.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from echo_hub.core.accounting.effects import TellStandby
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.activation.choice import Bools, Demand, Floats, cheapest
from echo_hub.core.activation.meter import CostMeter
from echo_hub.core.activation.priced import Priced
from echo_hub.core.activation.settings import HYSTERESIS, ActivationSettings
from echo_hub.core.nodes.node import Node
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.policy.measured import CompletionLengths
from echo_shared.wire.messages import StandbyReason

ROUND_S: Final = 5.0
"""Length in seconds of a round, which examines every node once, while any node has a price."""
GIFTS_ROUND_S: Final = 30.0
"""Length in seconds of a round, which examines every node once, while no node has a price."""
SLICE: Final = 256
"""Maximum number of nodes examined in one call of `advance`."""
REACT_S: Final = 1.0
"""Minimum time between two choices of active nodes, in seconds."""
ROUND_A_SECOND: Final = 5_000
"""Number of priced nodes examined per second on average. With many nodes, a round takes longer than `ROUND_S`."""
CHOICE_A_SECOND: Final = 20_000
"""Number of priced nodes considered in choices per second on average. With many nodes, choices are rarer than
`REACT_S`."""
CHANGES: Final = 2_048
"""Maximum number of nodes that one choice activates or deactivates."""
TRIED_SHARE: Final = 16
"""While the nodes of measured speed suffice, one unmeasured node may be on trial (active, to measure its speed) for
every 16 priced nodes that are wanted."""
TRIAL_S: Final = 180.0
"""Seconds after which a trial (activation of a node of unknown speed) without result ends. The wait until the node's
next trial starts at twice this value."""
SILENT_S: Final = 5.0
"""Seconds that a node's rollout is late before the node's measured rate counts as 0."""
LOST_S: Final = 60.0
"""Seconds that a node's rollout is late before the node is treated like one that was never measured."""
HANG_S: Final = 60.0
"""Seconds after a node's first hang (a rollout late by `SILENT_S`) until the node counts as settled again, that is
reliable enough to replace other nodes. The wait doubles with each further hang."""
MOST_DOUBLED: Final = 6
"""Maximum number of times that `HANG_S`, and the wait between a node's trials, are doubled."""
LEFT_KEPT: Final = 65_536
"""Number of departed nodes whose trials are remembered, so that a reconnect does not reset the wait for the next
trial."""
IDLE_S: Final = 30.0
"""Seconds without work after which a resting node (excluded from work after misbehaviour) is told why it gets none."""
IDLE_STEPS: Final = 3.0
"""Training steps without work after which an idle node that does not rest is told why it gets none. Before that, idling
is normal: many nodes idle between two steps."""
TURN_S: Final = 600.0
"""Minimum time in seconds between two turns (single-rollout leases) of a gift (a node that costs nothing) that is too
slow for ordinary work."""
FIRST_TURN_S: Final = 10.0
"""Seconds that a connected node without any scored rollout waits for its first turn, a single-rollout lease. Needed if
steps are too short for ordinary leases to nodes without results."""
TURNS_SHARE: Final = 32
"""Divisor that limits the turns (single-rollout leases to slow nodes): they take at most 1/32 of a step's rollouts,
minimum one."""
TURNS_KEPT: Final = 4_096
"""Number of turns (single-rollout leases to slow nodes) that are remembered until their rollouts arrive."""
VERSIONS_KEPT: Final = 64
"""Number of newest versions whose training time is remembered, to measure how long they take to reach nodes."""
_NEWS: Final = 0.5
"""Weight of a new measurement in a running average; the average so far has the rest of the weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStatus:
    """Result of the last choice of active nodes."""

    short: bool = True
    """True if the nodes of known speed cannot meet the demand within the spending cap, or the demand is unknown."""
    share: float = 0.0
    """Rollouts per step that active nodes return in time, divided by the learner's demand."""


@dataclass(frozen=True, slots=True)
class _Gifts:
    """Useful rollouts per step from gifts (nodes that cost nothing). `settled` counts only gifts that have worked for
    `dwell_s` without a late rollout."""

    all: float = 0.0
    settled: float = 0.0

    def plus(self, useful: float, node: Node, now: float) -> _Gifts:
        settled = useful if node.proven and node.settled_from <= now else 0.0
        return _Gifts(self.all + useful, self.settled + settled)

    def without(self, useful: float, node: Node, now: float) -> _Gifts:
        lost = _Gifts().plus(useful, node, now)
        return _Gifts(max(0.0, self.all - lost.all), max(0.0, self.settled - lost.settled))


_NOTHING: Final = _Gifts()


class Activation:
    """Decides which nodes are active. Report each node event here before reporting it to `Nodes`, unless a method says
    otherwise, and call `advance` at `due_at`."""

    def __init__(self, settings: ActivationSettings, *, nodes: Nodes, lengths: CompletionLengths, out: Outbox) -> None:
        self._settings = settings
        self._nodes = nodes
        self._lengths = lengths
        self._out = out
        self._priced = Priced()
        self._meter = CostMeter()
        self._trained_at: OrderedDict[int, float] = OrderedDict()
        self._behind_s = 0.0
        """Average seconds from the training of a version until a node reports having it: the estimate for nodes without
        a measurement of their own."""
        self._gifts = self._gifts_seen = _NOTHING
        """Useful rollouts per step of the gifts (nodes that cost nothing): the sum found by the last complete round
        (examination of all nodes), and the sum of the current round so far."""
        self._left: OrderedDict[str, tuple[int, float, float]] = OrderedDict()
        """Values of the columns `trials`, `not_before` and `tried_s` of `Priced`, kept for departed nodes without any
        result, by node."""
        self._to_see: deque[str] = deque()
        self._round_at = inf
        self._choose_at = inf
        self._chosen_at = -inf
        self._halted = ""
        """Reason why no priced node may be active at present; empty while nodes may be active."""
        self.standing = ActivationStatus()
        self.due_at = inf
        """Time at which `advance` must be called next; inf = never."""
        self._turns_left = 1
        self._turns: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Node and leasing time of each outstanding turn (single-rollout lease to a slow node), by rollout id."""

    @property
    def spend_per_hour(self) -> float:
        """Return the total price of all active nodes, in dollars per hour."""
        return self._meter.per_hour

    @property
    def num_active(self) -> int:
        """Return the number of active priced nodes."""
        return len(self._meter)

    @property
    def num_priced(self) -> int:
        return len(self._priced)

    # --- events

    def connected(self, node_id: str, now: float) -> None:
        """Add a connected node. Call this after `Nodes` has added it. A priced node stays on standby until a choice
        activates it."""
        node = self._nodes.get(node_id)
        if node is None or node.is_hub:
            return
        self._forget(node_id, now)
        node.taken_at = now
        if node.per_hour > 0:
            self._priced.add(node_id, node.per_hour, now)
            row = self._priced.row_of[node_id]
            before = self._left.pop(node_id, (0, 0.0, 0.0))
            self._priced.trials[row], self._priced.not_before[row], self._priced.tried_s[row] = before
        self._round_at = min(self._round_at, now + self._round_s)
        self._note_due()

    def disconnected(self, node_id: str, demand: Demand | None, now: float) -> None:
        """Remove a disconnected node. Call this before `Nodes` removes it. If the node was active, the active nodes are
        chosen again soon, so that others replace it."""
        node = self._nodes.get(node_id)
        if node is None or not node.connected:
            return
        if node.active and self._priced:
            self._choose_soon(now)
            if not node.per_hour and demand is not None:
                self._gifts = self._gifts.without(self._useful(node, demand), node, now)
        self._forget(node_id, now)
        self._note_due()

    def reported(self, node_id: str, capacity: int, policy_version: int | None, now: float) -> None:
        """Note a node's report of capacity and version. Call this before `Nodes` stores it: the old values are
        compared."""
        node = self._nodes.get(node_id)
        if node is None or not node.connected:
            return
        before = node.policy_version
        if policy_version is not None and before is not None and policy_version > before:
            trained_at = self._trained_at.get(policy_version)
            if trained_at is not None:
                behind_s = max(0.0, now - trained_at)
                node.behind_s += (_NEWS if node.behind_s else 1.0) * (behind_s - node.behind_s)
                self._behind_s += (_NEWS / 8 if self._behind_s else 1.0) * (behind_s - self._behind_s)
        if self._priced and (capacity > 0) != (node.capacity > 0):
            self._choose_soon(now)

    def trained(self, policy_version: int, rollouts_per_step: int, now: float) -> None:
        """Note that the learner has just trained this version. The limit of turns (single-rollout leases to slow nodes)
        starts over for the next step."""
        self._trained_at[policy_version] = now
        if len(self._trained_at) > VERSIONS_KEPT:
            self._trained_at.popitem(last=False)
        self._turns_left = max(1, rollouts_per_step // TURNS_SHARE)
        if self._priced:
            self._choose_soon(now)

    def halt(self, why: str, now: float) -> None:
        """Deactivate all priced nodes and tell idle nodes the reason `why`. An empty reason ends the halt."""
        if why == self._halted:
            return
        self._halted, self._round_at = why, now
        if self._priced:
            self._choose_at = now
        self._note_due()

    def change(self, settings: ActivationSettings, demand: Demand | None, now: float) -> None:
        """Apply new settings. If the active nodes cost more than a lowered spending cap, only those with the cheapest
        rollouts stay active."""
        self._settings = settings
        cap, cost = settings.spend_cap_per_hour, self._priced.cost
        for _ in range(len(self._priced) // CHANGES + 1 if self._meter.per_hour > cap else 0):
            rate = np.where(self._priced.active, self._priced.rate, 0.0)
            self._change(cheapest(rate, cost, need=inf, budget=cap), demand, now)
        if self._priced:
            self._choose_soon(now)

    def had_turn(self, rollout_id: str, node_id: str, now: float) -> None:
        """Note that this rollout was leased to the node as a turn: a single rollout for a too slow node."""
        self._turns_left -= 1
        self._turns[rollout_id] = (node_id, now)
        if len(self._turns) > TURNS_KEPT:
            self._turns.popitem(last=False)

    def came_late(self, node_id: str, rollout_id: str, num_tokens: int, sampling_s: float, now: float) -> None:
        """Note a rollout that arrived after its lease had ended. If the rollout was a turn, which measures a slow node,
        update the node's measured speed."""
        turn = self._turns.get(rollout_id)
        if turn is not None and turn[0] == node_id and self._nodes.get(node_id) is not None:
            del self._turns[rollout_id]
            self._nodes.measure(node_id, num_tokens, sampling_s=sampling_s, latency_s=now - turn[1], now=now)

    # --- choices

    def advance(self, demand: Demand | None, now: float) -> list[Node]:
        """Examine nodes and choose the active ones, as far as either is due. Return the nodes that should get a turn, a
        single-rollout lease. `demand` None: the learner's demand is unknown."""
        turns: list[Node] = []
        if now >= self._round_at:
            self._begin_round(now)
        elif now >= self._choose_at and not self._to_see and self._nodes.num_known <= SLICE:
            self._begin_round(now)  # A small fleet is examined completely before each choice.
        if self._to_see:
            self._look_at_some(demand, now, turns)
        if now >= self._choose_at:
            self._choose(demand, now)
        costs = self._meter.take(now)
        if costs is not None:
            self._out.record(costs)
        self._note_due()
        return turns

    def _note_due(self) -> None:
        self.due_at = -inf if self._to_see else min(self._round_at, self._choose_at, self._meter.due_at)

    @property
    def _round_s(self) -> float:
        return max(ROUND_S, len(self._priced) / ROUND_A_SECOND) if self._priced else GIFTS_ROUND_S

    @property
    def _react_s(self) -> float:
        return max(REACT_S, len(self._priced) / CHOICE_A_SECOND)

    def _begin_round(self, now: float) -> None:
        self._to_see = deque(self._nodes.ids())
        self._gifts_seen = _NOTHING
        self._round_at = now + self._round_s if self._to_see else inf

    def _look_at_some(self, demand: Demand | None, now: float, turns: list[Node]) -> None:
        for _ in range(min(SLICE, len(self._to_see))):
            node = self._nodes.get(self._to_see.popleft())
            if node is not None and node.connected and not node.is_hub:
                self._look_at(node, demand, now, turns)
        if not self._to_see:
            self._gifts = self._gifts_seen
            if self._priced:
                self._choose_at = min(self._choose_at, max(now, self._chosen_at + self._react_s))

    def _look_at(self, node: Node, demand: Demand | None, now: float, turns: list[Node]) -> None:
        may_work = node.rests_until is None and not node.quarantined
        willing = node.capacity > 0 and node.policy_version is not None and may_work
        self._note_settled(node, now)
        if node.per_hour > 0:
            row = self._priced.row_of[node.node_id]
            self._note_pace(node, row, willing, now)
            if not node.active:
                if self._priced.since[row] < self._chosen_at:
                    self._tell_why(node, demand)
                return
        elif willing and demand is not None and (node.late_since is None or now - node.late_since < SILENT_S):
            self._gifts_seen = self._gifts_seen.plus(self._useful(node, demand), node, now)
        if willing and demand is not None and self._waits_for_first(node, now) and len(turns) < self._turns_left:
            turns.append(node)
        idle_s, steps_s = now - node.taken_at, 0.0 if demand is None else IDLE_STEPS * demand.step_s
        if node.in_flight or (idle_s < IDLE_S and not self._halted):
            self._tell(node, None)
        elif node.rests_until is not None:
            self._tell(node, StandbyReason.FAILING)
        elif idle_s < steps_s and not self._halted:
            self._tell(node, None)
        elif self._halted and willing:
            self._tell(node, StandbyReason.NO_WORK_NOW, self._halted)
        elif willing and self._is_too_slow(node, demand):
            self._tell_why(node, demand)
            if (node.per_hour or now - node.taken_at >= TURN_S) and len(turns) < self._turns_left:
                turns.append(node)
        elif willing:
            self._tell(node, StandbyReason.NO_WORK_NOW)

    def _note_settled(self, node: Node, now: float) -> None:
        if node.late_since is not None and now - node.late_since >= SILENT_S:
            node.num_hangs += not node.hangs
            node.hangs = True
            node.settled_from = now + HANG_S * 2.0 ** min(node.num_hangs - 1, MOST_DOUBLED)
        else:
            node.hangs = False
            if node.proven and not node.settled_from:
                node.settled_from = now + self._settings.dwell_s

    def _waits_for_first(self, node: Node, now: float) -> bool:
        fresh = not node.proven and not node.pace.tokens_per_s and not node.held and self._nodes.unproven_may
        return fresh and now - node.taken_at >= FIRST_TURN_S

    def _note_pace(self, node: Node, row: int, willing: bool, now: float) -> None:
        priced = self._priced
        priced.willing[row] = willing
        priced.rate[row], priced.late_s[row] = self._rate(node), self._late_s(node)
        priced.silent_s[row] = 0.0 if node.late_since is None else now - node.late_since
        priced.settled_from[row] = node.settled_from

    def _rate(self, node: Node) -> float:
        """Return how many rollouts per second the node samples at its measured speed; 0 before its first scored
        rollout."""
        mean = self._lengths.mean_tokens
        return node.pace.tokens_per_s / mean if mean and node.proven else 0.0

    def _late_s(self, node: Node) -> float:
        return (node.behind_s or self._behind_s) + node.pace.token_s * self._lengths.mean_tokens + node.pace.way_s

    def _useful(self, node: Node, demand: Demand) -> float:
        return demand.useful(self._rate(node), self._late_s(node))

    def _is_too_slow(self, node: Node, demand: Demand | None) -> bool:
        """Return True if a rollout of this node takes so long that it is too stale for every step when it arrives.
        Speeds measured by turns (single-rollout leases) count as well."""
        measured = node.pace.tokens_per_s > 0 and self._lengths.mean_tokens > 0
        return demand is not None and measured and not demand.useful(1.0, self._late_s(node))

    def _choose_soon(self, now: float) -> None:
        self._choose_at = min(self._choose_at, max(now, self._chosen_at + self._react_s))
        self._note_due()

    def _choose(self, demand: Demand | None, now: float) -> None:
        self._chosen_at, self._choose_at = now, inf
        priced, settings = self._priced, self._settings
        if not priced:
            return
        rate = np.where(priced.willing & (priced.silent_s < SILENT_S), priced.rate, 0.0)
        useful = rate if demand is None else demand.useful(rate, priced.late_s)
        full = 0.0 if self._halted else inf if demand is None else demand.need * settings.margin
        target, floor = full - self._gifts.all, full * (1 - HYSTERESIS) - self._gifts.all
        wanted = self._of_measured(useful, target, floor, full - self._gifts.settled, now)
        brought = float(useful[wanted].sum())
        short = brought < floor
        wanted |= priced.active & priced.willing & (priced.silent_s >= SILENT_S) & (priced.silent_s < LOST_S)
        wanted |= self._tried(wanted, useful, short, now)
        share = (brought + self._gifts.all) / demand.need if demand is not None else 0.0
        self.standing = ActivationStatus(short=short, share=share)
        self._change(wanted, demand, now)

    def _of_measured(self, useful: Floats, target: float, floor: float, settled_target: float, now: float) -> Bools:
        """Return which measured nodes should be active. `useful`: each node's useful rollouts per step.

        If the active nodes return less than `floor`, add the cheapest others until the sum reaches `target`. Otherwise
        keep the cheapest active nodes that together return `settled_target`. Also keep all active nodes that are not
        settled: they are too new to replace others.
        """
        priced, cap, cost = self._priced, self._settings.spend_cap_per_hour, self._priced.cost
        active = priced.active & (useful > 0)
        brought, spent = float(useful[active].sum()), float(cost[active].sum())
        if brought < floor:
            others = np.where(active, 0.0, useful)
            more = active | cheapest(others, cost, need=target - brought, budget=cap - spent)
            # Added nodes may not fit under the spending cap. Then a set chosen from scratch may return more rollouts
            # than `more`.
            fresh = cheapest(useful, cost, need=target, budget=cap)
            gain = 1 + HYSTERESIS
            return fresh if float(useful[fresh].sum()) > gain * float(useful[more].sum()) else more
        young = active & (priced.settled_from > now) & (not self._halted)
        fewer = cheapest(np.where(active & ~young, useful, 0.0), cost, need=settled_target, budget=inf) | young
        with np.errstate(divide="ignore", invalid="ignore"):
            price = cost / useful * np.where(active, 1 - HYSTERESIS, 1.0)
        fresh = cheapest(useful, cost, need=target, budget=cap, price=price)
        if cost[fresh].sum() >= (1 - HYSTERESIS) * cost[fewer].sum():
            return fewer
        if cost[fewer | fresh].sum() <= cap:
            return fewer | fresh
        return fewer if (young & ~fresh).any() else fresh

    def _tried(self, wanted: Bools, useful: Floats, short: bool, now: float) -> Bools:
        """Return the nodes to activate on trial: willing nodes of unknown speed, or last measured as too slow. End the
        trials that had `TRIAL_S` without a result."""
        priced = self._priced
        unknown = priced.willing & ((useful == 0) & (priced.silent_s < SILENT_S) | (priced.silent_s >= LOST_S))
        over = np.flatnonzero(unknown & priced.active & (priced.since - priced.tried_s <= now - TRIAL_S))
        priced.trials[over] += 1
        priced.tried_s[over] = 0.0
        priced.not_before[over] = now + TRIAL_S * 2.0 ** np.minimum(priced.trials[over], MOST_DOUBLED)
        able = np.flatnonzero(unknown & (priced.not_before <= now))
        room = len(able) if short else int(wanted.sum() + TRIED_SHARE - 1) // TRIED_SHARE
        room *= not self._halted
        # Nodes already on trial come first, so that a newcomer does not end their trial early.
        order = able[np.lexsort((priced.cost[able], priced.trials[able], ~priced.active[able]))]
        tried = np.zeros(len(priced), bool)
        left = self._settings.spend_cap_per_hour - float(priced.cost[wanted].sum())
        order = order[priced.cost[order] <= left][:room]
        tried[order[priced.cost[order].cumsum() <= left]] = True
        return tried

    def _change(self, wanted: Bools, demand: Demand | None, now: float) -> None:
        """Make exactly the `wanted` nodes active, at most `CHANGES` per call. Deactivate first, so that the spending
        cap holds at every moment."""
        priced = self._priced
        leave = np.flatnonzero(priced.active & ~wanted)[:CHANGES]
        enter = np.flatnonzero(wanted & ~priced.active)[: CHANGES - len(leave)]
        for row in leave.tolist():
            node_id = priced.node_ids[row]
            priced.active[row], priced.since[row] = False, now
            self._meter.end(node_id, now)
            node = self._nodes.set_active(node_id, False)
            self._tell_why(node, demand)
        for row in enter.tolist():
            node_id = priced.node_ids[row]
            priced.active[row], priced.since[row] = True, now
            self._meter.begin(node_id, float(priced.cost[row]), now)
            node = self._nodes.set_active(node_id, True)
            node.taken_at = now
            node.settled_from = max(node.settled_from, now + self._settings.dwell_s)
            priced.settled_from[row] = node.settled_from
            self._tell(node, None)
        if len(leave) + len(enter) == CHANGES:
            self._choose_at = now + REACT_S
        elif len(priced) <= SLICE:  # In larger fleets, the next round tells the nodes on standby.
            for row in np.flatnonzero(~wanted).tolist():
                standing = self._nodes.get(priced.node_ids[row])
                if standing is not None:
                    self._tell_why(standing, demand)

    def _forget(self, node_id: str, now: float) -> None:
        priced = self._priced
        row = priced.row_of.get(node_id)
        if row is None:
            return
        self._meter.end(node_id, now)
        tried_s = float(priced.tried_s[row] + (now - priced.since[row] if priced.active[row] else 0.0))
        if not priced.rate[row] and (tried_s or priced.trials[row]):
            self._left[node_id] = (int(priced.trials[row]), float(priced.not_before[row]), tried_s)
            if len(self._left) > LEFT_KEPT:
                self._left.popitem(last=False)
        priced.remove(node_id)

    # --- reasons sent to nodes

    def _tell_why(self, node: Node, demand: Demand | None) -> None:
        """Tell the node why it gets no work: the first of the reasons below that applies."""
        cap = self._settings.spend_cap_per_hour
        if node.rests_until is not None:
            self._tell(node, StandbyReason.FAILING)
        elif node.capacity < 1 or node.policy_version is None:
            return  # The node asks for no work.
        elif self._halted:
            self._tell(node, StandbyReason.NO_WORK_NOW, self._halted)
        elif node.per_hour > cap:
            spends = f"at most ${cap:.4g} an hour" if cap else "nothing"
            detail = f"It costs ${node.per_hour:.4g} an hour; the hub spends {spends}."
            self._tell(node, StandbyReason.SPEND_CAP, detail)
        elif demand is not None and self._is_too_slow(node, demand):
            took_s = self._late_s(node)
            window_s = demand.max_staleness * demand.step_s
            detail = f"The node needs about {took_s:.3g} s per version and rollout. The limit is {window_s:.3g} s."
            self._tell(node, StandbyReason.TOO_SLOW, detail)
        elif node.per_hour and self._priced.trials[self._priced.row_of[node.node_id]] and not node.proven:
            self._tell(
                node, StandbyReason.NO_WORK_NOW, "The node's last trial gave no result. The hub will try it again."
            )
        elif self.standing.short:
            self._tell(node, StandbyReason.SPEND_CAP, f"The hub spends at most ${cap:.4g} an hour.")
        else:
            self._tell(node, StandbyReason.CHEAPER_NODES_SUFFICE)

    def _tell(self, node: Node, reason: StandbyReason | None, detail: str = "") -> None:
        """Send the node the reason why it has no work (None: it may get work), unless that was the last message. A
        quarantined node is told only of its quarantine."""
        halted = self._halted if reason is StandbyReason.NO_WORK_NOW else ""
        if (node.told is not reason or node.told_halted != halted) and not node.quarantined:
            node.told, node.told_halted = reason, halted
            self._out.act(TellStandby(node_id=node.node_id, reason=reason, detail=detail))
