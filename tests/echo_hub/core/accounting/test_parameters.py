from __future__ import annotations

from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.evaluation.by_nodes import GREEDY_TEMPERATURE


def test_the_temperature_of_greedy_leases_is_greedy() -> None:
    assert SamplingParameters(temperature=GREEDY_TEMPERATURE, max_tokens=1).is_greedy
    assert not SamplingParameters(temperature=0.2, max_tokens=1).is_greedy
