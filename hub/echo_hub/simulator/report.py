"""The figures of a simulated run."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np

from echo_hub.simulator.core_cost import held_bytes
from echo_hub.simulator.hours import HourFigures
from echo_hub.simulator.rule import demand_of, needed_staleness, pool_of, useful_rollouts
from echo_hub.simulator.world import World
from echo_shared.wire.messages import DropReason


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreFigures:
    """Cost of the coordinator itself in time and memory, measured with the clock of the caller."""

    events: int
    events_per_s: float | None
    """Events that the coordinator handled per second; None if the clock did not advance."""
    worst_event_ms: float
    """Longest time of one event in milliseconds, garbage collection included."""
    worst_event: str
    events_by_kind: dict[str, int]
    ms_by_kind: dict[str, float]
    """Total milliseconds of the events of each kind."""
    bytes_per_node: float
    """Bytes of all objects that the coordinator holds at the end, divided by the number of nodes. After a finished run
    it holds no more work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """Figures of a simulated run. Counts are numbers of rollouts over the whole run, unless stated otherwise."""

    finished: bool
    """False if the limit of virtual time was reached first."""
    virtual_s: float
    steps: int
    utilisation: float
    """Share of time after the warm-up in which a step was trained."""
    idle_s: float
    """Seconds that the learner was idle after the warm-up."""
    leased: int
    trained: int
    answered: int
    """Number of rollouts delivered to tenants."""
    dropped: dict[str, int]
    """Number of dropped rollouts by reason."""
    in_flight: int
    """Number of leased rollouts that are neither trained, answered nor dropped at the end."""
    drop_shares: dict[str, float]
    """Dropped rollouts by reason, as shares of the leased ones."""
    stale_share: float
    """Share of leased rollouts that were dropped as stale, or revoked before they were finished."""
    mean_staleness: float
    """Mean staleness of rollouts when they are trained on, after the warm-up steps. Every rollout counts as stale as
    the oldest one of its group.
    """
    token_staleness: float
    """Mean staleness of the trained tokens. A token's staleness follows from the version that sampled it."""
    mixed_share: float
    """Share of planned rollouts sampled with more than one version."""
    needed_staleness: float | None
    """Smallest mean staleness with which the pool keeps the learner busy (`capacity.rule`); None if none does."""
    useful_over_needed: float
    """Rollouts that the pool samples in time, divided by the learner's demand; the provisioning rule requires at least
    1."""
    idle_nodes_share: float
    """Share of honest nodes that never got a lease, among those that ever connected."""
    liars_share: float
    """Share of leased rollouts that went to liars (nodes that return nothing), without the first minute."""
    trained_by_node: tuple[float, float, float]
    """Trained rollouts per honest node: 10th, 50th and 90th percentile."""
    mean_lease: float
    median_lease: float
    tokens_drawn: int
    """Tokens sampled by honest nodes for trained or dropped groups."""
    again_share: float
    """Share of `tokens_drawn` sampled at a position that another lease of the same rollout had sampled before."""
    given_share: float
    """Tokens taken over from earlier attempts at a rollout, divided by `tokens_drawn`."""
    failures: int
    """Number of times that a node vanished and lost unfinished rollouts."""
    tokens_lost_per_failure: float
    """Mean number of tokens per failure that were sampled but not streamed to the hub, and so lost."""
    by_hour: tuple[HourFigures, ...]
    cost: float
    """Dollars paid to rented nodes while connected and active."""
    core: CoreFigures

    @property
    def balanced(self) -> bool:
        return self.leased == self.trained + self.answered + sum(self.dropped.values()) + self.in_flight


def report_of(world: World) -> SimulationReport:
    accounts = world.accounts
    pool, demand = pool_of(world.scenario), demand_of(world.scenario)
    steps, utilisation, idle_s = _learner(world)
    tokens = world.fleet.tokens
    there = [node for node in world.fleet.honest if node.session]
    percentiles = np.percentile([accounts.trained_of[node.number] for node in there] or [0], (10, 50, 90))
    stale = accounts.dropped[DropReason.STALE] + accounts.dropped[DropReason.REVOKED]
    sizes = list(accounts.lease_sizes.elements())
    return SimulationReport(
        finished=world.finished,
        virtual_s=world.agenda.now,
        steps=steps,
        utilisation=utilisation,
        idle_s=idle_s,
        leased=accounts.leased,
        trained=accounts.trained,
        answered=accounts.answered,
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


def table(report: SimulationReport) -> list[tuple[str, str]]:
    """Return rows of (name, figures) for display."""
    p10, p50, p90 = report.trained_by_node
    core, needed = report.core, report.needed_staleness
    speed = "" if core.events_per_s is None else f", {core.events_per_s:,.0f} per second"
    dropped = ", ".join(
        f"{reason} {count:,} ({report.drop_shares[reason]:.2%})" for reason, count in report.dropped.items()
    )
    return [
        ("Steps", f"{report.steps:,} in {report.virtual_s:,.0f} s" + ("" if report.finished else "; not finished")),
        ("Learner utilisation", f"{report.utilisation:.1%}; idle for {report.idle_s:,.1f} s"),
        ("Pool samples in time", f"{report.useful_over_needed:.2f} times the demand of an always busy learner"),
        ("Mean staleness", f"{report.mean_staleness:.2f}; needed " + ("-" if needed is None else f"{needed:.2f}")),
        (
            "  of a token",
            f"{report.token_staleness:.2f}; {report.mixed_share:.1%} of the rollouts with several versions",
        ),
        ("Rollouts leased", f"{report.leased:,}; in leases of {report.mean_lease:.1f}"),
        ("  trained", f"{report.trained:,}"),
        ("  dropped", dropped or "none"),
        ("  in flight", f"{report.in_flight:,}"),
        ("Stale or revoked", f"{report.stale_share:.1%} of the leased"),
        ("Trained by node", f"{p10:,.0f}, {p50:,.0f}, {p90:,.0f} (10th, 50th, 90th percentile)"),
        ("Nodes without work", f"{report.idle_nodes_share:.1%}"),
        ("Leased to false claims", f"{report.liars_share:.1%}, without the first minute"),
        (
            "Tokens drawn",
            f"{report.tokens_drawn:,}; {report.again_share:.1%} of them again; "
            f"{report.given_share:.1%} saved by resuming",
        ),
        (
            "  lost with a node",
            f"{report.tokens_lost_per_failure:,.0f} per failure; {report.failures:,} failures with unfinished work",
        ),
        *_day(report.by_hour),
        ("Cost", f"{report.cost:,.2f}"),
        ("Coordinator", f"{core.events:,} events{speed}; {core.bytes_per_node:,.0f} bytes per node"),
        ("  slowest event", f"{core.worst_event_ms:,.1f} ms ({core.worst_event})"),
    ]


def _day(hours: tuple[HourFigures, ...]) -> list[tuple[str, str]]:
    full = hours[:-1]
    if len(full) < 2:
        return []
    nodes, busy = [hour.nodes for hour in full], [hour.utilisation for hour in full]
    return [
        ("By the hour", f"{min(nodes):,.0f} to {max(nodes):,.0f} nodes, utilisation {min(busy):.1%} to {max(busy):.1%}")
    ]


def _learner(world: World) -> tuple[int, float, float]:
    """Return trained steps, utilisation and idle seconds."""
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
    """Return what rented nodes would cost in dollars if they were paid whenever connected."""
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
