from __future__ import annotations

from pathlib import Path

from benchmarks.ingest.cases import CASES, MOST_TOKENS
from echo_hub.config.file import load_config


def test_every_case_is_a_hub_that_takes_all_its_nodes() -> None:
    assert [(case.nodes, case.gateways, case.server) for case in CASES] == [
        *((nodes, 0, False) for nodes in (10, 100, 1_000, 3_000)),
        *((nodes, 0, True) for nodes in (100, 1_000)),
        *((100, gateways, False) for gateways in (1, 2, 4)),
    ]
    for case in CASES:
        config = load_config(None, case.settings(Path("base"), seed=3))
        assert case.nodes <= config.server.max_nodes_per_address
        assert case.nodes < 0.75 * config.server.max_connections, "unknown nodes have no more"
        assert (config.run.seed, config.sampling.max_tokens) == (3, MOST_TOKENS)
        assert case.capacity >= 1
    assert len({case.name for case in CASES}) == len(CASES)
