"""Which nodes are *active*, and who is told why it has no work.

Gifts are always active: they cost nothing, and wait in the order in which they last had work. Of the nodes that cost
something, the cheapest by price per rollout are, as many as bring what the learner takes and the gifts do not, with a
margin (`useful`, `choice`). All others stand by: they are sent versions, finish what they hold, and are leased nothing.

    enter   when the margin has shrunk by `HYSTERESIS`: as many as restore it, at once, whoever was lost
    leave   when the margin holds without them, after `dwell_s`
    change  for others that cost less by `HYSTERESIS` or more, likewise: those work beside them until they are settled,
            as far as the cap has room for both
    cap     all active nodes together cost no more than `spend_cap_per_hour`, at any moment

A node that has returned nothing yet cannot be judged. Where those that are measured do not suffice, all that the cap
has room for are tried; where nodes that cost something work, one in `TRIED_SHARE` is, for it may be cheaper; where
gifts suffice, none is. A trial that brings nothing ends after `TRIAL_S`, and the next one is later each time. Until a
step was trained nobody knows what suffices, so that then, too, the cap is what limits.

A node that needs longer for a rollout than it is of use for is *too slow*. Its pace may change, so it has a turn
every `TURN_S`: a member of the youngest group, which others are asked for as well, so that no step waits for it.

A gift has such turns by itself. One that costs something has one where it would be tried if it had returned nothing
yet: it may only have hung for a while. A node that has returned nothing yet has one as well, where steps are so short
that nobody can wait for it.

What a node brings is believed, but nobody stands by for its sake before it is *settled*: before it has worked for
`dwell_s` and let nobody wait. Who lets others wait, so that they have to step in, is settled only `HANG_S` after that,
and twice as long each time. So a node that looks fast and cheap, and then brings nothing, costs a few seconds once.

Nothing is done at most events. All nodes are looked at in slices, `SLICE` in a turn, a round every few seconds; a
choice is one pass over arrays of those that cost something, once a second at most, and changes `CHANGES` of them at
most. Where many cost something both are rarer: with 100,000 of them a slice takes about 1.5 ms, a choice 40 ms, every
5 s at most, and all of it 4 % of a processor.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from math import inf
from typing import Final

import numpy as np

from echo_hub.core.activation.choice import Bools, Floats, cheapest
from echo_hub.core.activation.meter import Meter
from echo_hub.core.activation.priced import Priced
from echo_hub.core.activation.settings import HYSTERESIS, ActivationSettings
from echo_hub.core.activation.useful import Demand
from echo_hub.core.effects import TellStandby
from echo_hub.core.lengths import Lengths
from echo_hub.core.nodes.node import Node
from echo_hub.core.nodes.ready import Nodes
from echo_hub.core.outbox import Outbox
from echo_shared.messages import StandbyReason

ROUND_S: Final = 5.0
"""All nodes are looked at so often while any of them costs something."""
GIFTS_ROUND_S: Final = 30.0
"""And so often while none does."""
SLICE: Final = 256
REACT_S: Final = 1.0
"""Between two choices, at least."""
ROUND_A_SECOND: Final = 5_000
"""Nodes that cost something that are looked at in a second, on average, and"""
CHOICE_A_SECOND: Final = 20_000
"""those that are chosen among."""
CHANGES: Final = 2_048
TRIED_SHARE: Final = 16
TRIAL_S: Final = 180.0
SILENT_S: Final = 5.0
"""What a node brings does not count any more when nothing has come in for so long though something should have; and"""
LOST_S: Final = 60.0
"""after so long it is taken for one that has returned nothing yet."""
HANG_S: Final = 60.0
"""A node that has let others wait is settled so long after it has stopped to; the next time twice as long."""
MOST_DOUBLED: Final = 6
"""This wait, and that between trials, double so often at most."""
LEFT_KEPT: Final = 65_536
"""Nodes that have left and whose trials are remembered."""
IDLE_S: Final = 30.0
"""Who had no work for so long is told that it rests, if it does. Any other is told why once it had none"""
IDLE_STEPS: Final = 3.0
"""for so many steps as well: between two of them many have none."""
TURN_S: Final = 600.0
FIRST_TURN_S: Final = 10.0
"""One that has returned nothing yet has a turn after so long, where steps are too short to lease to it otherwise."""
TURNS_SHARE: Final = 32
"""Of the rollouts of a step, one in so many is such a turn at most; but one may always be."""
TURNS_KEPT: Final = 4_096
VERSIONS_KEPT: Final = 64
_NEWS: Final = 0.5
"""What a new measurement counts for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """What the last choice came to."""

    short: bool = True
    """The nodes that are measured do not suffice, or nobody knows."""
    share: float = 0.0
    """What active nodes bring in time, over what the learner takes."""


@dataclass(frozen=True, slots=True)
class _Gifts:
    """Rollouts a step that gifts bring, and those of them that are settled."""

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
    """Told of nodes before `Nodes` is, and asked in each turn that it is due in."""

    def __init__(self, settings: ActivationSettings, *, nodes: Nodes, lengths: Lengths, out: Outbox) -> None:
        self._settings = settings
        self._nodes = nodes
        self._lengths = lengths
        self._out = out
        self._priced = Priced()
        self._meter = Meter()
        self._trained_at: OrderedDict[int, float] = OrderedDict()
        self._behind_s = 0.0
        """From a version's training until a node has it: of those that had it last."""
        self._gifts = self._gifts_seen = _NOTHING
        """What gifts bring, by the last round, and so far in this one."""
        self._left: OrderedDict[str, tuple[int, float, float]] = OrderedDict()
        """Trials, not_before and tried_s of nodes that have left and have returned nothing yet."""
        self._to_see: deque[str] = deque()
        self._round_at = inf
        self._choose_at = inf
        self._chosen_at = -inf
        self._halted = ""
        """Why nobody is paid for anything now; empty: they are."""
        self.standing = Standing()
        self.due_at = inf
        """When `advance` has something to do; inf = never."""
        self._turns_left = 1
        self._turns: OrderedDict[str, tuple[str, float]] = OrderedDict()
        """Whose turn each rollout was, and when it was leased."""

    @property
    def spend_per_hour(self) -> float:
        """What all active nodes cost together, in dollars."""
        return self._meter.per_hour

    @property
    def num_active(self) -> int:
        """Nodes that cost something and are active."""
        return len(self._meter)

    @property
    def num_priced(self) -> int:
        """Nodes that cost something and are connected."""
        return len(self._priced)

    # --- what happens

    def connected(self, node_id: str, now: float) -> None:
        """After `Nodes` knows it; one that costs something is not active before it is chosen."""
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
        """Before `Nodes` knows it. If it worked, others take its place at the next opportunity."""
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
        """Before `Nodes` knows it."""
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
        """This version has just been made."""
        self._trained_at[policy_version] = now
        if len(self._trained_at) > VERSIONS_KEPT:
            self._trained_at.popitem(last=False)
        self._turns_left = max(1, rollouts_per_step // TURNS_SHARE)
        if self._priced:
            self._choose_soon(now)

    def halt(self, why: str, now: float) -> None:
        """Nobody is paid for anything, and all are told why, until this is told again with nothing for a reason."""
        if why == self._halted:
            return
        self._halted, self._round_at = why, now
        if self._priced:
            self._choose_at = now
        self._note_due()

    def change(self, settings: ActivationSettings, demand: Demand | None, now: float) -> None:
        """From now on. Beneath a cap that has fallen, those go on at once that bring the most for their price."""
        self._settings = settings
        cap, cost = settings.spend_cap_per_hour, self._priced.cost
        for _ in range(len(self._priced) // CHANGES + 1 if self._meter.per_hour > cap else 0):
            rate = np.where(self._priced.active, self._priced.rate, 0.0)
            self._change(cheapest(rate, cost, need=inf, budget=cap), demand, now)
        if self._priced:
            self._choose_soon(now)

    def had_turn(self, rollout_id: str, node_id: str, now: float) -> None:
        """This rollout is the turn of a node that is too slow."""
        self._turns_left -= 1
        self._turns[rollout_id] = (node_id, now)
        if len(self._turns) > TURNS_KEPT:
            self._turns.popitem(last=False)

    def came_late(self, node_id: str, rollout_id: str, num_tokens: int, sampling_s: float, now: float) -> None:
        """A rollout that nobody waits for any more: if it was a turn, it tells its node's pace."""
        turn = self._turns.get(rollout_id)
        if turn is not None and turn[0] == node_id and self._nodes.get(node_id) is not None:
            del self._turns[rollout_id]
            self._nodes.measure(node_id, num_tokens, sampling_s=sampling_s, latency_s=now - turn[1], now=now)

    # --- what follows

    def advance(self, demand: Demand | None, now: float) -> list[Node]:
        """What is due. `demand` None: nobody knows what the learner takes. Returns the nodes whose turn it is."""
        turns: list[Node] = []
        if now >= self._round_at:
            self._begin_round(now)
        elif now >= self._choose_at and not self._to_see and self._nodes.num_known <= SLICE:
            self._begin_round(now)  # A small fleet is looked at before each choice.
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
        """Rollouts a second; 0: not measured."""
        mean = self._lengths.mean_tokens
        return node.pace.tokens_per_s / mean if mean and node.proven else 0.0

    def _late_s(self, node: Node) -> float:
        return (node.behind_s or self._behind_s) + node.pace.token_s * self._lengths.mean_tokens + node.pace.way_s

    def _useful(self, node: Node, demand: Demand) -> float:
        return demand.useful_of(self._rate(node), self._late_s(node))

    def _is_too_slow(self, node: Node, demand: Demand | None) -> bool:
        """By its pace, that of a turn included: what comes too late proves nothing, but tells how slow its node is."""
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
        self.standing = Standing(short=short, share=share)
        self._change(wanted, demand, now)

    def _of_measured(self, useful: Floats, target: float, floor: float, settled_target: float, now: float) -> Bools:
        """Of the nodes whose pace is known, those to be active: all that are, more if they bring less than `floor`, or
        fewer, as long as those that are settled bring `settled_target`."""
        priced, cap, cost = self._priced, self._settings.spend_cap_per_hour, self._priced.cost
        active = priced.active & (useful > 0)
        brought, spent = float(useful[active].sum()), float(cost[active].sum())
        if brought < floor:
            others = np.where(active, 0.0, useful)
            more = active | cheapest(others, cost, need=target - brought, budget=cap - spent)
            anew = cheapest(useful, cost, need=target, budget=cap)  # Where the cap binds, others may bring more.
            gain = 1 + HYSTERESIS
            return anew if float(useful[anew].sum()) > gain * float(useful[more].sum()) else more
        young = active & (priced.settled_from > now) & (not self._halted)
        fewer = cheapest(np.where(active & ~young, useful, 0.0), cost, need=settled_target, budget=inf) | young
        with np.errstate(divide="ignore", invalid="ignore"):
            price = cost / useful * np.where(active, 1 - HYSTERESIS, 1.0)
        anew = cheapest(useful, cost, need=target, budget=cap, price=price)
        if cost[anew].sum() >= (1 - HYSTERESIS) * cost[fewer].sum():
            return fewer
        if cost[fewer | anew].sum() <= cap:
            return fewer | anew
        return fewer if (young & ~anew).any() else anew

    def _tried(self, wanted: Bools, useful: Floats, short: bool, now: float) -> Bools:
        """Of the nodes whose pace is not known, or was too slow when it was last seen, those to be active."""
        priced = self._priced
        unknown = priced.willing & ((useful == 0) & (priced.silent_s < SILENT_S) | (priced.silent_s >= LOST_S))
        over = np.flatnonzero(unknown & priced.active & (priced.since - priced.tried_s <= now - TRIAL_S))
        priced.trials[over] += 1
        priced.tried_s[over] = 0.0
        priced.not_before[over] = now + TRIAL_S * 2.0 ** np.minimum(priced.trials[over], MOST_DOUBLED)
        able = np.flatnonzero(unknown & (priced.not_before <= now))
        room = len(able) if short else int(wanted.sum() + TRIED_SHARE - 1) // TRIED_SHARE
        room *= not self._halted
        # Those under way first, so that a trial is not cut short by who comes later.
        order = able[np.lexsort((priced.cost[able], priced.trials[able], ~priced.active[able]))]
        tried = np.zeros(len(priced), bool)
        left = self._settings.spend_cap_per_hour - float(priced.cost[wanted].sum())
        order = order[priced.cost[order] <= left][:room]
        tried[order[priced.cost[order].cumsum() <= left]] = True
        return tried

    def _change(self, wanted: Bools, demand: Demand | None, now: float) -> None:
        """Those that leave first: so the cap holds at every moment."""
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
        elif len(priced) <= SLICE:  # Of more, the next round tells the others.
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

    # --- what nodes are told

    def _tell_why(self, node: Node, demand: Demand | None) -> None:
        """What keeps this node from work, in the order in which it would have to be mended."""
        cap = self._settings.spend_cap_per_hour
        if node.rests_until is not None:
            self._tell(node, StandbyReason.FAILING)
        elif node.capacity < 1 or node.policy_version is None:
            return  # It asks for none.
        elif self._halted:
            self._tell(node, StandbyReason.NO_WORK_NOW, self._halted)
        elif node.per_hour > cap:
            spends = f"at most ${cap:.4g} an hour" if cap else "nothing"
            detail = f"It costs ${node.per_hour:.4g} an hour; the hub spends {spends}."
            self._tell(node, StandbyReason.SPEND_CAP, detail)
        elif demand is not None and self._is_too_slow(node, demand):
            took_s = self._late_s(node)
            window_s = demand.max_staleness * demand.step_s
            detail = f"Version and rollout take it about {took_s:.3g} s; after {window_s:.3g} s a rollout is too old."
            self._tell(node, StandbyReason.TOO_SLOW, detail)
        elif node.per_hour and self._priced.trials[self._priced.row_of[node.node_id]] and not node.proven:
            self._tell(node, StandbyReason.NO_WORK_NOW, "It returned nothing when it was tried; it is tried again.")
        elif self.standing.short:
            self._tell(node, StandbyReason.SPEND_CAP, f"The hub spends at most ${cap:.4g} an hour.")
        else:
            self._tell(node, StandbyReason.CHEAPER_NODES_SUFFICE)

    def _tell(self, node: Node, reason: StandbyReason | None, detail: str = "") -> None:
        """Once for each reason, and for each of those for which nobody has work; to who is quarantined, that alone is
        said."""
        halted = self._halted if reason is StandbyReason.NO_WORK_NOW else ""
        if (node.told is not reason or node.told_halted != halted) and not node.quarantined:
            node.told, node.told_halted = reason, halted
            self._out.act(TellStandby(node_id=node.node_id, reason=reason, detail=detail))
