"""The nodes of a scenario, with capabilities drawn from the seed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo_hub.simulator.scenario import Scenario


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """One node's capabilities, constant for the whole run."""

    width: int
    capacity: int
    s_per_token: float
    """Seconds per token in each of the rollouts sampled at once; the mean of `paces` if these are known."""
    prefill_s: float
    """Seconds for the prefill of one prompt."""
    prefill_token_s: float = 0.0
    """Seconds for the prefill of one token that was sampled earlier."""
    fetch_s: float
    """Seconds from a version's announcement until the node has it, if the formula of `SimulatedPublication` applies."""
    phase: float
    """The node's position in its day (period of availability) at the start, 0..1; 0 = it has just connected."""
    price_per_hour: float
    uplink_bytes_s: float = 0.0
    downlink_bytes_s: float = 0.0
    paces: tuple[float, ...] = ()
    """Seconds per token of rollouts measured on a real machine, in order.

    The node's rollouts use these values in turn, starting over at the end. Empty: all use `s_per_token`.
    """

    @property
    def tokens_per_s(self) -> float:
        """Return the speed that the node claims, in tokens per second: the speed of all its slots. It has half as many
        slots as its claimed capacity."""
        return self.capacity / (2 * self.s_per_token)


def draw_nodes(scenario: Scenario) -> list[Traits]:
    nodes, publication = scenario.nodes, scenario.publication
    chance = np.random.default_rng([scenario.run.seed, 2])
    slowness = np.exp(-nodes.sigma * chance.standard_normal(nodes.count))
    slowness *= np.where(chance.random(nodes.count) < nodes.slow_share, nodes.slow_factor, 1.0)
    downlinks = publication.node_downlink_bytes_s * np.exp(
        publication.downlink_sigma * chance.standard_normal(nodes.count)
    )
    phases = -scenario.availability.begin_spread * chance.random(nodes.count) % 1.0
    rented = chance.random(nodes.count) < nodes.rented_share
    asked = prices_per_hour(scenario, slowness, chance)
    prices = np.where(rented, asked, 0.0)
    uplinks = publication.node_uplink_bytes_s * np.exp(publication.uplink_sigma * chance.standard_normal(nodes.count))
    all_uplinks = float(uplinks.sum())
    prefill_s = nodes.prefill_s_per_token * scenario.lengths.prompt_tokens
    return [
        Traits(
            width=nodes.width,
            capacity=2 * nodes.width,
            s_per_token=nodes.s_per_token * slow,
            prefill_s=prefill_s * slow,
            prefill_token_s=nodes.prefill_s_per_token * slow,
            fetch_s=fetch_s(scenario, downlink, all_uplinks),
            phase=phase,
            price_per_hour=price,
            uplink_bytes_s=uplink,
            downlink_bytes_s=downlink,
        )
        for slow, downlink, phase, price, uplink in zip(
            slowness.tolist(), downlinks.tolist(), phases.tolist(), prices.tolist(), uplinks.tolist(), strict=True
        )
    ]


def prices_per_hour(
    scenario: Scenario, slowness: NDArray[np.float64], chance: np.random.Generator
) -> NDArray[np.float64]:
    """Return the price in dollars per hour that each node asks if the node is rented, [N]."""
    nodes, prices = scenario.nodes, scenario.prices
    if not prices.per_1000_rollouts:
        return np.full(nodes.count, nodes.price_per_hour)
    per_hour = 3600 * nodes.width / (nodes.s_per_token * slowness * scenario.lengths.tokens)
    factor = np.exp(np.log(prices.spread) * chance.random(nodes.count))
    asked: NDArray[np.float64] = prices.per_1000_rollouts / 1000 * per_hour * factor
    return asked


def liar(scenario: Scenario) -> Traits:
    """Return the traits of a liar: a node that claims capacity, with slots as fast as the median node's, and never
    finishes anything."""
    capacity = scenario.false_claims.capacity
    return Traits(
        width=0,
        capacity=capacity,
        s_per_token=scenario.nodes.s_per_token,
        prefill_s=0.0,
        fetch_s=0.0,
        phase=0.0,
        price_per_hour=0.0,
    )


def fetch_s(scenario: Scenario, downlink_bytes_s: float, all_uplinks_bytes_s: float) -> float:
    """Return the seconds from a version's announcement to its arrival over this downlink, by the formula of
    `SimulatedPublication`."""
    publication, count = scenario.publication, scenario.nodes.count
    size, uplink = publication.payload_bytes, publication.hub_uplink_bytes_s
    by_all = count * size / (uplink + all_uplinks_bytes_s)
    return publication.start_s + publication.factor * max(size / uplink, by_all, size / downlink_bytes_s)
