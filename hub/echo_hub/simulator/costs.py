"""The costs of a simulated run, from the coordinator's records, and the messages that tell nodes why they get no
work."""

from __future__ import annotations

from collections import Counter

from echo_hub.core.accounting.effects import CostAccrued, TellStandby
from echo_hub.core.activation.settings import ActivationSettings
from echo_hub.simulator.population import Traits
from echo_hub.simulator.scenario import Scenario


class Costs:
    """Dollars paid to nodes. `by_time`: pairs of time and total dollars so far, one per record."""

    def __init__(self) -> None:
        self.dollars = 0.0
        self.by_time: list[tuple[float, float]] = [(0.0, 0.0)]
        self.told: Counter[str] = Counter()
        """Number of messages that told a node why it gets no work, by reason."""

    def accrue(self, record: CostAccrued, now: float) -> None:
        self.dollars += sum(cost.dollars for cost in record.nodes)
        self.by_time.append((now, self.dollars))

    def tell(self, action: TellStandby) -> None:
        if action.reason is not None:
            self.told[action.reason] += 1

    def until(self, now: float) -> float:
        """Return the total dollars recorded until `now`. The costs of the last seconds may not be recorded yet."""
        return max((dollars for at, dollars in self.by_time if at <= now), default=0.0)


def activation_settings(scenario: Scenario) -> ActivationSettings:
    prices = scenario.prices
    return ActivationSettings(
        spend_cap_per_hour=prices.spend_cap_per_hour,
        margin=prices.margin,
        dwell_s=prices.dwell_s,
    )


def asked_of_hub(scenario: Scenario, traits: Traits) -> float:
    """Return the price per hour that the node tells the coordinator: 0 if the scenario pays all nodes in any case."""
    return traits.price_per_hour if scenario.prices.choose else 0.0
