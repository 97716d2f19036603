"""Cases: the number of nodes and gateways, the frames, and the database."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness import broker, postgresql

FRAMES: Final = (2_000, 16_000)
"""Approximate bytes of a rollout's frame: completions of 210 and 1,960 tokens."""
NODES: Final = (10, 100, 1_000, 3_000)
GATEWAYS: Final = (1, 2, 4)
BEHIND_GATEWAYS: Final = 100
"""Number of nodes in cases with gateways."""
NODES_OF_SERVER: Final = (100, 1_000)
"""Numbers of nodes in cases with PostgreSQL."""
MOST_TOKENS: Final = 2_048
IN_FLIGHT: Final = 1_000
"""Least number of rollouts that all nodes hold together."""
LEAST_HELD: Final = 1
"""Least number of rollouts that each node holds."""
STEP_GROUPS: Final = 1_024
GROUP_SIZE: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One measured hub, in one process, with its nodes and database."""

    nodes: int
    gateways: int = 0
    """Gateway processes before the hub; 0 if the hub itself holds the nodes' connections."""
    server: bool = False
    """True for PostgreSQL, False for SQLite."""

    @property
    def name(self) -> str:
        store = "PostgreSQL" if self.server else "SQLite"
        if self.gateways:
            return f"{self.nodes:,} nodes, {self.gateways} gateway{'s' if self.gateways > 1 else ''}, {store}"
        return f"{self.nodes:,} nodes, one process, {store}"

    @property
    def seconds(self) -> float:
        return 50 + self.nodes / 40 + (20 if self.gateways else 0)

    @property
    def lacks(self) -> str:
        """Why this machine cannot measure the case; empty if it can."""
        return (broker.lacking() if self.gateways else "") or (postgresql.lacking() if self.server else "")

    @property
    def capacity(self) -> int:
        """Capacity that a node reports."""
        return max(LEAST_HELD, IN_FLIGHT // self.nodes)

    def settings(
        self, base: Path, *, seed: int, broker_url: str = "", store_url: str = ""
    ) -> Mapping[str, Mapping[str, Any]]:
        """Settings of the hub. The nodes' rollouts were drawn by no model, so no verifier checks them."""
        most = 1_000_000
        return {
            "run": {"name": "ingest", "seed": seed},
            "model": {"base": str(base)},
            "store": {"url": store_url},
            "task": {"name": "arithmetic", "scorer_processes": 1},
            "sampling": {"max_tokens": MOST_TOKENS},
            "training": {"steps": 100_000, "groups_per_step": STEP_GROUPS, "group_size": GROUP_SIZE},
            "learner": {"threads": 1, "checkpoint_every": 1_000},
            "trust": {"verifier": "off"},
            "evaluation": {"problems": 1, "every": 0},
            "dissemination": {"way": "web_seed"},
            "server": {
                "port": 0,
                "shared_memory": False,
                "joins_per_s": 10_000,
                "connections_per_s": most,
                "connections_per_s_per_address": most,
                "requests_per_s": most,
                "requests_per_s_per_address": most,
                "max_nodes_per_address": most,
                "trusted_proxies": ["127.0.0.1"] if broker_url else [],
            },
            "gateways": {"url": broker_url},
        }


CASES: Final = (
    *(Case(nodes=nodes) for nodes in NODES),
    *(Case(nodes=nodes, server=True) for nodes in NODES_OF_SERVER),
    *(Case(nodes=BEHIND_GATEWAYS, gateways=number) for number in GATEWAYS),
)
