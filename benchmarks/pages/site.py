"""The hub whose pages are measured: it trains, two real nodes work for it, and its database is that of a long run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from benchmarks.harness.books import Amount, fill
from benchmarks.harness.site import Settings, Site, merged, open_site, serving
from echo_hub.store.database import connect

NODES_AT_WORK: Final = 2
STEPS_BEFORE: Final = 8
"""Training steps before the database is filled, which give each table genuine rows."""
PATIENCE_S: Final = 300.0
ELSEWHERE: Final = ("nice", "-n", "19")
"""Command prefix of nodes: hub and learner take precedence on the shared processor."""
SETTINGS: Final[Settings] = {
    "run": {"name": "pages"},
    "training": {"steps": 100_000},
    "learner": {"threads": 1, "checkpoint_every": 5},
    "sampling": {"max_tokens": 6},
    "evaluation": {"problems": 16},
    "server": {"port": 0, "shared_memory": False},
}


@contextmanager
def filled_site(scratch: Path, *, nodes: int, rollouts: int, seed: int) -> Iterator[Site]:
    """Serve a hub whose database has this many nodes and rollouts, with two nodes at work."""
    with open_site(scratch, merged(SETTINGS, {"run": {"seed": seed}})) as site:
        _work(site)
        site.wait_for_step(STEPS_BEFORE, within_s=PATIENCE_S)
    engine = connect(site.run.database_url)
    fill(engine, Amount(nodes=nodes, rollouts=rollouts), seed=seed, now=time.time())
    engine.dispose()
    with serving(site.run, scratch) as site:
        _work(site)
        site.wait_for_step(site.newest_step() + 1, within_s=PATIENCE_S)
        yield site


def _work(site: Site) -> None:
    for _ in range(NODES_AT_WORK):
        site.node(["--backend", "torch"], within=ELSEWHERE)
