"""The figures of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from echo_hub.simulator.core_cost import held_bytes
from echo_hub.simulator.hours import HourFigures
from echo_hub.simulator.rule import demand_of, needed_staleness, pool_of, useful_rollouts
from echo_hub.simulator.world import World
from echo_shared.messages import DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreFigures:
    """What the coordinator itself took, by the clock that the run was given."""

    events: int
    events_per_s: float | None
    """None: no time passed by that clock."""
    worst_event_ms: float
    """Garbage collection included."""
    worst_event: str
    """Its kind."""
    events_by_kind: dict[str, int]
    ms_by_kind: dict[str, float]
    """All events of a kind together."""
    bytes_per_node: float
    """All objects that it holds at the end by `sys.getsizeof`, over the nodes; after a run that is finished no work is
    among them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Counts are of rollouts, and of the whole run, unless they say otherwise."""

    finished: bool
    """False: the limit of virtual time came first."""
    virtual_s: float
    steps: int
    """Trained."""
    utilisation: float
    """Share of the time after the warm-up in which a step was trained."""
    idle_s: float
    """Of the learner, after the warm-up."""
    leased: int
    trained: int
    dropped: dict[str, int]
    """By reason."""
    in_flight: int
    """Neither trained nor dropped at the end."""
    drop_shares: dict[str, float]
    """By reason, of those leased."""
    stale_share: float
    """Dropped as stale or revoked, of those leased."""
    mean_staleness: float
    """When consumed, in steps after the warm-up; all rollouts of a group count as its oldest."""
    token_staleness: float
    """Likewise, each token as old as the version that drew it."""
    mixed_share: float
    """Of these rollouts, those that more than one version drew."""
    needed_staleness: float | None
    """The least mean staleness that keeps the learner busy, see `rule`; None: nothing keeps it busy."""
    useful_over_needed: float
    """What the pool samples in time over what the learner takes: at least 1 by the provisioning rule."""
    idle_nodes_share: float
    """Honest nodes that never got a lease, of those that were ever there."""
    liars_share: float
    """Leased to those who claim falsely, of all that was leased after the first minute."""
    trained_by_node: tuple[float, float, float]
    """The 10th, 50th and 90th percentile of the honest nodes."""
    mean_lease: float
    """Rollouts in a lease."""
    median_lease: float
    tokens_drawn: int
    """By honest nodes, for groups that were trained or dropped."""
    again_share: float
    """Of these: drawn in the place of one that another lease of the same index had drawn before."""
    given_share: float
    """Not drawn by who went on with what had been drawn before, over those that were."""
    failures: int
    """Times that a node vanished and lost unfinished rollouts."""
    tokens_lost_per_failure: float
    """Drawn, and not sent before."""
    by_hour: tuple[HourFigures, ...]
    """Of virtual time."""
    cost: float
    """What the rented nodes cost while they were connected and active."""
    core: CoreFigures

    @property
    def balanced(self) -> bool:
        """Whether leased = trained + dropped + in flight."""
        return self.leased == self.trained + sum(self.dropped.values()) + self.in_flight


def report_of(world: World) -> Report:
    """What the run came to; `run` has ended."""
    accounts = world.accounts
    pool, demand = pool_of(world.scenario), demand_of(world.scenario)
    steps, utilisation, idle_s = _learner(world)
    tokens = world.fleet.tokens
    there = [node for node in world.fleet.honest if node.session]
    percentiles = np.percentile([accounts.trained_of[node.number] for node in there] or [0], (10, 50, 90))
    stale = accounts.dropped[DropReason.STALE] + accounts.dropped[DropReason.REVOKED]
    sizes = list(accounts.lease_sizes.elements())
    return Report(
        finished=world.finished,
        virtual_s=world.agenda.now,
        steps=steps,
        utilisation=utilisation,
        idle_s=idle_s,
        leased=accounts.leased,
        trained=accounts.trained,
        dropped={str(reason): count for reason, count in sorted(accounts.dropped.items())},
        in_flight=world.core.coordinator.status().in_flight,
        drop_shares={
            str(reason): count / accounts.leased for reason, count in sorted(accounts.dropped.items()) if count
        },
        stale_share=stale / max(1, accounts.leased),
        mean_staleness=accounts.planned_staleness / max(1, accounts.planned),
        token_staleness=accounts.token_staleness / max(1, accounts.tokens),
        mixed_share=accounts.mixed / max(1, accounts.planned),
        needed_staleness=needed_staleness(pool, demand),
        useful_over_needed=useful_rollouts(pool, demand) / demand.rollouts_per_step,
        idle_nodes_share=sum(not accounts.leased_of[node.number] for node in there) / max(1, len(there)),
        liars_share=accounts.leased_to_liars / max(1, accounts.leased_late),
        trained_by_node=(float(percentiles[0]), float(percentiles[1]), float(percentiles[2])),
        mean_lease=accounts.leased / max(1, len(sizes)),
        median_lease=float(median(sizes)) if sizes else 0.0,
        tokens_drawn=tokens.drawn,
        again_share=tokens.again / max(1, tokens.drawn),
        given_share=tokens.given / max(1, tokens.drawn),
        failures=tokens.failures,
        tokens_lost_per_failure=tokens.lost / max(1, tokens.failures),
        by_hour=world.hours.figures(world.steps, world.agenda.now),
        cost=_cost(world),
        core=_core(world),
    )


def table(report: Report) -> list[tuple[str, str]]:
    """What is told of it: names and figures."""
    p10, p50, p90 = report.trained_by_node
    core, needed = report.core, report.needed_staleness
    speed = "" if core.events_per_s is None else f", {core.events_per_s:,.0f} a second"
    dropped = ", ".join(
        f"{reason} {count:,} ({report.drop_shares[reason]:.2%})" for reason, count in report.dropped.items()
    )
    return [
        ("Steps", f"{report.steps:,} in {report.virtual_s:,.0f} s" + ("" if report.finished else "; not finished")),
        ("Learner utilisation", f"{report.utilisation:.1%}; idle for {report.idle_s:,.1f} s"),
        ("Pool samples in time", f"{report.useful_over_needed:.2f} of what a learner takes that is always busy"),
        ("Mean staleness", f"{report.mean_staleness:.2f}; needed " + ("-" if needed is None else f"{needed:.2f}")),
        ("  of a token", f"{report.token_staleness:.2f}; {report.mixed_share:.1%} of the rollouts by several versions"),
        ("Rollouts leased", f"{report.leased:,}; in leases of {report.mean_lease:.1f}"),
        ("  trained", f"{report.trained:,}"),
        ("  dropped", dropped or "none"),
        ("  in flight", f"{report.in_flight:,}"),
        ("Stale or revoked", f"{report.stale_share:.1%} of the leased"),
        ("Trained by node", f"{p10:,.0f}, {p50:,.0f}, {p90:,.0f} (10th, 50th, 90th percentile)"),
        ("Nodes without work", f"{report.idle_nodes_share:.1%}"),
        ("Leased to false claims", f"{report.liars_share:.1%}, the first minute left out"),
        (
            "Tokens drawn",
            f"{report.tokens_drawn:,}; {report.again_share:.1%} of them again; "
            f"{report.given_share:.1%} saved by going on",
        ),
        (
            "  lost with a node",
            f"{report.tokens_lost_per_failure:,.0f} each time; {report.failures:,} vanished with unfinished work",
        ),
        *_day(report.by_hour),
        ("Cost", f"{report.cost:,.2f}"),
        ("Coordinator", f"{core.events:,} events{speed}; {core.bytes_per_node:,.0f} bytes a node"),
        ("  slowest event", f"{core.worst_event_ms:,.1f} ms ({core.worst_event})"),
    ]


def _day(hours: tuple[HourFigures, ...]) -> list[tuple[str, str]]:
    """The least and the most of its full hours, where there are several."""
    full = hours[:-1]
    if len(full) < 2:
        return []
    nodes, busy = [hour.nodes for hour in full], [hour.utilisation for hour in full]
    return [
        ("By the hour", f"{min(nodes):,.0f} to {max(nodes):,.0f} nodes, utilisation {min(busy):.1%} to {max(busy):.1%}")
    ]


def _learner(world: World) -> tuple[int, float, float]:
    """Steps, utilisation and idle seconds."""
    now = world.agenda.now
    done = [step for step in world.steps if step[1] <= now]
    if world.finished:
        now = done[-1][1]
    warm_up = world.scenario.measuring.warm_up_steps
    since = done[warm_up - 1][1] if 0 < warm_up < len(done) else 0.0
    busy_s = sum(min(end, now) - begin for begin, end in world.steps if since <= begin < now)
    return len(done), busy_s / (now - since) if now > since else 0.0, now - since - busy_s


def _cost(world: World) -> float:
    if world.scenario.prices.choose:
        return world.costs.dollars
    return connected_cost(world)


def connected_cost(world: World) -> float:
    """What the rented nodes cost if they are paid as long as they are connected."""
    now = world.agenda.now
    return sum(
        node.traits.price_per_hour * (node.connected_s + (now - node.connected_at if node.connected else 0.0)) / 3600
        for node in world.fleet.honest
    )


def _core(world: World) -> CoreFigures:
    cost = world.core.cost
    seconds = cost.seconds
    worst_s, worst_event = cost.worst
    return CoreFigures(
        events=cost.events,
        events_per_s=cost.events / seconds if seconds else None,
        worst_event_ms=1000 * worst_s,
        worst_event=worst_event,
        events_by_kind={name: kind.count for name, kind in sorted(cost.kinds.items())},
        ms_by_kind={name: 1000 * kind.seconds for name, kind in sorted(cost.kinds.items())},
        bytes_per_node=held_bytes(world.core.coordinator) / len(world.fleet.honest),
    )
