"""A node that lies as a checker, on a hub of its own where nodes check each other: who is believed.

It draws honestly, so what others find of it speaks for it. What it says of others' completions is a lie each time, or
every other time. Three honest nodes of two engines are there: two agree against it, whoever of them has drawn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.processes import RunFailed
from benchmarks.trust.protocol import Unnoticed
from benchmarks.trust.site import Site, open_site
from echo_hub.core.trust.reasons import OUTVOTED

TORCH: Final = ("--backend", "torch")
LLAMA: Final = ("--backend", "llama_cpp", "--precision", "f32")
HONEST: Final = (TORCH, LLAMA, LLAMA)
WITHIN_S: Final = 300.0
LOOK_S: Final = 0.1
SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "run": {"mode": "async"},
    "training": {"max_staleness": 16},
    "trust": {"verifier": "nodes"},
}


def judged(liar: tuple[str, str], quarantined: int) -> str | None:
    """What is said of the liar's state and the reason for it, None where there is nothing to say yet. Raises Unnoticed
    where an honest node is `quarantined`, which are so many."""
    if quarantined:
        raise Unnoticed(f"{quarantined} honest nodes are quarantined")
    state, reason = liar
    return f"the liar is {state}, the honest ones are not quarantined" if reason == OUTVOTED else None


def _look(site: Site, liar: str) -> str | None:
    if site.hub.poll() is not None:
        raise RunFailed(f"the hub has ended: see {site.scratch}")
    query = "SELECT t.state, t.reason FROM trust t JOIN nodes n ON n.node_id = t.node_id WHERE n.name = ?"
    found = site.rows(query, liar)
    decided = "SELECT count(*) FROM trust_log t JOIN nodes n ON n.node_id = t.node_id"
    ((quarantined,),) = site.rows(f"{decided} WHERE n.name != ? AND t.decision = 'quarantined'", liar)
    return judged(found[0] if found else ("new", ""), quarantined)


async def lying_checker(scratch: Path, seed: int, *, share: float) -> str:
    """It accuses others of this share of what it is asked about."""
    with open_site(scratch, seed=seed, sections=SETTINGS) as site:
        for options in HONEST:
            site.node(options)
        liar, began_at = site.node(TORCH, attack="accuses", share=share), time.monotonic()
        while time.monotonic() - began_at < WITHIN_S:
            how = await asyncio.to_thread(_look, site, liar.name)
            if how is not None:
                ((opinions,),) = site.rows("SELECT coalesce(sum(num_checked), 0) FROM trust")
                return f"{how}; {opinions} checks in {time.monotonic() - began_at:.0f} s"
            await asyncio.sleep(LOOK_S)
        raise Unnoticed(f"the liar is trusted after {WITHIN_S:.0f} s")


Attack = Callable[[Path, int], Awaitable[str]]
"""Below this directory, by a run's seed."""
ATTACKS: Final[Mapping[str, Attack]] = {
    "accuses everybody": partial(lying_checker, share=1.0),
    "accuses every other time": partial(lying_checker, share=0.5),
}
"""By name."""
