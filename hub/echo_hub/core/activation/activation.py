"""Choice of *active* nodes, and the reasons sent to nodes without work.

Gifts are always active: they cost nothing, and wait in the order of their last work. Among priced nodes, the cheapest
per rollout are active: as many as cover, with a margin, the learner's demand that gifts leave (`useful`, `choice`). All
other priced nodes stand by: they get versions and finish held work, but get no leases.

    enter   when the margin has shrunk by `HYSTERESIS`: at once, enough nodes to restore it.
    leave   when the margin holds without the node, after `dwell_s`.
    change  when new nodes cost less by `HYSTERESIS` or more, likewise. New nodes work alongside old ones until settled,
            if the cap allows both.
    cap     the total cost of all active nodes never exceeds `spend_cap_per_hour`

A node without any result cannot be judged. If measured nodes do not suffice, all unmeasured nodes within the cap are
tried. If priced nodes work, one in `TRIED_SHARE` is tried, because it may be cheaper. If gifts suffice, none is tried.
A trial without results ends after `TRIAL_S`, and the wait for the next one doubles. Before the first trained step the
demand is unknown, so only the cap limits trials.

A node is *too slow* if its rollouts arrive too late to be useful. Its pace may change, so every `TURN_S` it gets a
turn: one member of the youngest group. Other nodes may take the same member, so no step waits for the turn.

Gifts that are too slow get turns regularly. Too slow priced nodes get turns under the conditions of a trial, because a
slow result may be one hang. Unproven nodes get turns too if steps are too short to wait for their first rollouts.

A node's results count at once. Other nodes stand by only for *settled* nodes: those that worked for `dwell_s` without
delaying others. A node that makes others step in is settled only `HANG_S` later, doubling each time. So a node that
looks fast and cheap but stalls costs a few seconds once.

Most events cause no work here. Nodes are examined in slices of `SLICE` per turn, a round every few seconds. A choice is
one pass over arrays of priced nodes, at most once a second, and changes at most `CHANGES` nodes. Both become rarer with
many priced nodes. For 100,000 priced nodes, measured cost is about 1.5 ms per slice and 40 ms per choice (every 5 s): 4
% of a processor.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from echo_hub.core.accounting.effects import TellStandby
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.activation.choice import Bools, Floats, cheapest
from echo_hub.core.activation.meter import CostMeter
from echo_hub.core.activation.priced import Priced
from echo_hub.core.activation.settings import HYSTERESIS, ActivationSettings
from echo_hub.core.activation.useful import Demand
from echo_hub.core.nodes.node import Node
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.policy.lengths import CompletionLengths
from echo_shared.wire.messages import StandbyReason

ROUND_S: Final = 5.0
"""Length of a round over all nodes, with priced nodes present."""
GIFTS_ROUND_S: Final = 30.0
"""Length of a round while all nodes are gifts."""
SLICE: Final = 256
"""Maximum number of nodes examined per turn."""
REACT_S: Final = 1.0
"""Shortest time between two choices."""
ROUND_A_SECOND: Final = 5_000
"""Average number of priced nodes examined per second, which stretches rounds in large fleets."""
CHOICE_A_SECOND: Final = 20_000
"""Average number of priced nodes in choices per second, which stretches the time between choices."""
CHANGES: Final = 2_048
"""Maximum number of activations and deactivations per choice."""
TRIED_SHARE: Final = 16
"""Active priced nodes per concurrent trial."""
TRIAL_S: Final = 180.0
"""Length of a trial, and base of the wait until the next one."""
SILENT_S: Final = 5.0
"""Time without expected results after which a node's rate no longer counts."""
LOST_S: Final = 60.0
"""Time without expected results after which a node is treated as unmeasured."""
HANG_S: Final = 60.0
"""Wait until a node that delayed others is settled again; doubles each time."""
MOST_DOUBLED: Final = 6
"""Maximum number of doublings of `HANG_S` and of the wait between trials."""
LEFT_KEPT: Final = 65_536
"""Number of departed nodes whose trials are remembered."""
IDLE_S: Final = 30.0
"""Time without work after which a resting node is told so."""
IDLE_STEPS: Final = 3.0
"""Time without work, in steps, after which any other idle node is told the reason: many nodes idle between two
steps."""
TURN_S: Final = 600.0
"""Shortest time between two turns of a gift that is too slow."""
FIRST_TURN_S: Final = 10.0
"""Wait of an unproven node before its first turn, if steps are too short for an ordinary lease."""
TURNS_SHARE: Final = 32
"""Divisor of the turns per step: at most 1/32 of a step's rollouts, at least one."""
TURNS_KEPT: Final = 4_096
"""Number of remembered turns."""
VERSIONS_KEPT: Final = 64
"""Number of versions whose training time is remembered."""
_NEWS: Final = 0.5
"""Weight of a new measurement in running averages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationStatus:
    """Result of the last choice."""

    short: bool = True
    """True if the measured nodes do not suffice, or the demand is unknown."""
    share: float = 0.0
    """Rollouts that active nodes return in time, relative to the learner's demand."""


@dataclass(frozen=True, slots=True)
class _Gifts:
    """Rollouts per step from gifts: all, and those from settled gifts."""

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
    """Activation of nodes. Report node events here before `Nodes` unless stated otherwise, and call `advance` when
    due."""

    def __init__(self, settings: ActivationSettings, *, nodes: Nodes, lengths: CompletionLengths, out: Outbox) -> None:
        self._settings = settings
        self._nodes = nodes
        self._lengths = lengths
        self._out = out
        self._priced = Priced()
        self._meter = CostMeter()
        self._trained_at: OrderedDict[int, float] = OrderedDict()
        self._behind_s = 0.0
        """Running average of the delay from training a version until a node has it."""
        self._gifts = self._gifts_seen = _NOTHING
        """Gifts' contribution, as of the last round and in the current round so far."""
        self._left: OrderedDict[str, tuple[int, float, float]] = OrderedDict()
        """Trials, not_before and tried_s of departed nodes without any result."""
        self._to_see: deque[str] = deque()
        self._round_at = inf
        self._choose_at = inf
        self._chosen_at = -inf
        self._halted = ""
        """Reason for paying no node at present; empty: nodes are paid."""
        self.standing = ActivationStatus()
        self.due_at = inf
        """Time of the next necessary `advance`; inf = never."""
        self._turns_left = 1
        self._turns: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Node and leasing time of each turn's rollout."""

    @property
    def spend_per_hour(self) -> float:
        """Return the total cost of all active nodes, in dollars per hour."""
        return self._meter.per_hour

    @property
    def num_active(self) -> int:
        """Return the number of active priced nodes."""
        return len(self._meter)

    @property
    def num_priced(self) -> int:
        """Return the number of connected priced nodes."""
        return len(self._priced)

    # --- events

    def connected(self, node_id: str, now: float) -> None:
        """Add a node, after `Nodes` has added it. A priced node stays inactive until chosen."""
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
        """Remove a node, before `Nodes` does. Other nodes soon replace an active one."""
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
        """Note a report, before `Nodes` does."""
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
        """Note that the learner has just trained this version."""
        self._trained_at[policy_version] = now
        if len(self._trained_at) > VERSIONS_KEPT:
            self._trained_at.popitem(last=False)
        self._turns_left = max(1, rollouts_per_step // TURNS_SHARE)
        if self._priced:
            self._choose_soon(now)

    def halt(self, why: str, now: float) -> None:
        """Pay no node and send all nodes the reason `why`; an empty reason ends the halt."""
        if why == self._halted:
            return
        self._halted, self._round_at = why, now
        if self._priced:
            self._choose_at = now
        self._note_due()

    def change(self, settings: ActivationSettings, demand: Demand | None, now: float) -> None:
        """Apply new settings. Under a lowered cap, only the nodes with the best price per rollout stay active."""
        self._settings = settings
        cap, cost = settings.spend_cap_per_hour, self._priced.cost
        for _ in range(len(self._priced) // CHANGES + 1 if self._meter.per_hour > cap else 0):
            rate = np.where(self._priced.active, self._priced.rate, 0.0)
            self._change(cheapest(rate, cost, need=inf, budget=cap), demand, now)
        if self._priced:
            self._choose_soon(now)

    def had_turn(self, rollout_id: str, node_id: str, now: float) -> None:
        """Note that this rollout is the turn of a too slow node."""
        self._turns_left -= 1
        self._turns[rollout_id] = (node_id, now)
        if len(self._turns) > TURNS_KEPT:
            self._turns.popitem(last=False)

    def came_late(self, node_id: str, rollout_id: str, num_tokens: int, sampling_s: float, now: float) -> None:
        """Note a rollout that arrived too late to count. If the rollout was a turn, measure the node's pace."""
        turn = self._turns.get(rollout_id)
        if turn is not None and turn[0] == node_id and self._nodes.get(node_id) is not None:
            del self._turns[rollout_id]
            self._nodes.measure(node_id, num_tokens, sampling_s=sampling_s, latency_s=now - turn[1], now=now)

    # --- choices

    def advance(self, demand: Demand | None, now: float) -> list[Node]:
        """Do all due work, and return the nodes that get a turn. `demand` None: unknown demand."""
        turns: list[Node] = []
        if now >= self._round_at:
            self._begin_round(now)
        elif now >= self._choose_at and not self._to_see and self._nodes.num_known <= SLICE:
            self._begin_round(now)  # Examine a small fleet before each choice.
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
        """Return the node's rollouts per second; 0: not measured."""
        mean = self._lengths.mean_tokens
        return node.pace.tokens_per_s / mean if mean and node.proven else 0.0

    def _late_s(self, node: Node) -> float:
        return (node.behind_s or self._behind_s) + node.pace.token_s * self._lengths.mean_tokens + node.pace.way_s

    def _useful(self, node: Node, demand: Demand) -> float:
        return demand.useful_of(self._rate(node), self._late_s(node))

    def _is_too_slow(self, node: Node, demand: Demand | None) -> bool:
        """True if rollouts at the node's measured pace come too late. Paces measured in turns count as well."""
        measured = node.pace.tokens_per_s > 0 and self._lengths.mean_tokens > 0
        return demand is not None and measured and not demand.useful_of(1.0, self._late_s(node))

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
        """Return the measured nodes that should be active. Keep the active nodes. Add nodes if they return less than
        `floor`. Remove nodes as long as the settled ones still return `settled_target`."""
        priced, cap, cost = self._priced, self._settings.spend_cap_per_hour, self._priced.cost
        active = priced.active & (useful > 0)
        brought, spent = float(useful[active].sum()), float(cost[active].sum())
        if brought < floor:
            others = np.where(active, 0.0, useful)
            more = active | cheapest(others, cost, need=target - brought, budget=cap - spent)
            # Under a binding cap, a different set may return more.
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
        """Return the nodes to try: those without a known pace, or last seen as too slow."""
        priced = self._priced
        unknown = priced.willing & ((useful == 0) & (priced.silent_s < SILENT_S) | (priced.silent_s >= LOST_S))
        over = np.flatnonzero(unknown & priced.active & (priced.since - priced.tried_s <= now - TRIAL_S))
        priced.trials[over] += 1
        priced.tried_s[over] = 0.0
        priced.not_before[over] = now + TRIAL_S * 2.0 ** np.minimum(priced.trials[over], MOST_DOUBLED)
        able = np.flatnonzero(unknown & (priced.not_before <= now))
        room = len(able) if short else int(wanted.sum() + TRIED_SHARE - 1) // TRIED_SHARE
        room *= not self._halted
        # Running trials first, so that a newcomer does not cut them short.
        order = able[np.lexsort((priced.cost[able], priced.trials[able], ~priced.active[able]))]
        tried = np.zeros(len(priced), bool)
        left = self._settings.spend_cap_per_hour - float(priced.cost[wanted].sum())
        order = order[priced.cost[order] <= left][:room]
        tried[order[priced.cost[order].cumsum() <= left]] = True
        return tried

    def _change(self, wanted: Bools, demand: Demand | None, now: float) -> None:
        """Deactivate before activating, so that the cap always holds."""
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
        elif len(priced) <= SLICE:  # In larger fleets, the next round tells the others.
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
        """Tell the node the first obstacle that keeps it from work."""
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
        """Send the node its reason, unless it has not changed. A quarantined node hears only of its quarantine."""
        halted = self._halted if reason is StandbyReason.NO_WORK_NOW else ""
        if (node.told is not reason or node.told_halted != halted) and not node.quarantined:
            node.told, node.told_halted = reason, halted
            self._out.act(TellStandby(node_id=node.node_id, reason=reason, detail=detail))
