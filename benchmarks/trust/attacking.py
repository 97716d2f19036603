"""Attacks by hand, one after the other: each row says whether it was noticed, how, and what it cost meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

from benchmarks.backends.cases import lacks
from benchmarks.driven_hub import DrivenHub
from benchmarks.processes import node_process
from benchmarks.progress import Planned, Progress
from benchmarks.trust import checkers, frames, going_on, members, network, pages, protocol, scorers, tls, towards_nodes
from benchmarks.trust.protocol import Attack, Noticed, Unnoticed, Victim
from benchmarks.trust.site import Site, open_site

ENDS_WITHIN_S: Final = 150.0
OWN_HUB_WITHIN_S: Final = 600.0
WARM_UP_STEPS: Final = 20
"""By then the hub's memory grows no more by itself."""
WARM_UP_S: Final = 600.0
NODE_OPTIONS: Final = ("--backend", "llama_cpp", "--precision", "f32")
MOST_LOG_BYTES: Final = 256 * 1024
"""That one attack may add to all logs of the hub and of its processes."""
HUB_SECONDS: Final = 10.0
TLS_SECONDS: Final = 20.0
OWN_HUB_SECONDS: Final = 45.0
NODE_SECONDS: Final = 5.0
ON_HUB: Final[Mapping[str, Attack]] = {
    **{f"protocol, {name}": attack for name, attack in protocol.ATTACKS.items()},
    **{f"network, {name}": attack for name, attack in network.ATTACKS.items()},
    **{f"frames, {name}": attack for name, attack in frames.ATTACKS.items()},
    **{f"members, {name}": attack for name, attack in members.ATTACKS.items()},
    **{f"pages, {name}": attack for name, attack in pages.ATTACKS.items()},
}
"""On one hub for all of them."""
ON_TLS_HUB: Final = {f"TLS, {name}": attack for name, attack in tls.ATTACKS.items()}
"""On one hub for all of them that speaks TLS itself."""
ON_OWN_HUB: Final[Mapping[str, Callable[[Path, int], Awaitable[str]]]] = {
    **{f"members, {name}": attack for name, attack in {**members.OWN, **going_on.ATTACKS}.items()},
    **{f"checkers, {name}": attack for name, attack in checkers.ATTACKS.items()},
    **{f"scorers, {name}": attack for name, attack in scorers.ATTACKS.items()},
}
ON_NODE: Final = {f"on a node, {name}": attack for name, attack in {**towards_nodes.ATTACKS, **members.ON_NODE}.items()}


def plan() -> list[Planned]:
    missing = lacks("llama_cpp", "f32")
    return [
        *(Planned(name=name, seconds=HUB_SECONDS, lacks=missing) for name in ON_HUB),
        *(Planned(name=name, seconds=TLS_SECONDS) for name in ON_TLS_HUB),
        *(Planned(name=name, seconds=OWN_HUB_SECONDS, lacks=missing) for name in ON_OWN_HUB),
        *(Planned(name=name, seconds=NODE_SECONDS, lacks=missing) for name in ON_NODE),
    ]


def measure(scratch: Path, progress: Progress, *, seed: int) -> list[dict[str, Any]]:
    """One row an attack. The hub is one for all of them: what one leaves behind, the next one meets."""
    rows = []
    if any(progress.wants(name) for name in ON_HUB):
        with open_site(scratch / "attacked", seed=seed) as site:
            site.node(NODE_OPTIONS)
            site.wait_for_step(WARM_UP_STEPS, within_s=WARM_UP_S)
            rows += _each(site, ON_HUB, progress)
    if any(progress.wants(name) for name in ON_TLS_HUB):
        with open_site(scratch / "tls", seed=seed, sections=tls.settings(scratch)) as site:
            rows += _each(site, ON_TLS_HUB, progress)
    for number, (name, own) in enumerate(ON_OWN_HUB.items()):
        if progress.wants(name):
            rows.append(_row(name, progress, partial(_on_own_hub, scratch / f"own-{number}", own, seed)))
    for name, on_node in ON_NODE.items():
        if progress.wants(name):
            rows.append(_row(name, progress, partial(_on_node, scratch / f"node-{len(rows)}", on_node)))
    return rows


def _each(site: Site, attacks: Mapping[str, Attack], progress: Progress) -> list[dict[str, Any]]:
    return [
        _row(name, progress, partial(_on_hub, site, attack)) for name, attack in attacks.items() if progress.wants(name)
    ]


def _row(name: str, progress: Progress, attack: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    began_at = time.monotonic()
    row = {"case": name, **attack(), "seconds": time.monotonic() - began_at}
    progress.done(name, {"detected": row["detected"], "how": row["how"]})
    return row


def _on_hub(site: Site, attack: Attack) -> dict[str, Any]:
    with site.watched() as health:
        verdict = _verdict(attack(Victim(site=site)))
    if health.log_bytes > MOST_LOG_BYTES or not health.is_log_plain:
        plain = "plain" if health.is_log_plain else "not plain"
        how = f"the log is {plain}, {health.log_bytes} bytes more; {verdict['how']}"
        verdict |= {"detected": False, "how": how}
    return {
        **verdict,
        "stall_s": health.stall_s,
        "rss_growth_mb": health.growth_bytes / 1e6,
        "log_kb": health.log_bytes / 1e3,
    }


def _on_own_hub(directory: Path, attack: Callable[[Path, int], Awaitable[str]], seed: int) -> dict[str, Any]:
    return _verdict(attack(directory, seed), within_s=OWN_HUB_WITHIN_S)


def _on_node(directory: Path, attack: towards_nodes.Attack) -> dict[str, Any]:
    async def run(processes: ExitStack) -> str:
        hub = DrivenHub(directory / "hub")
        await hub.open()

        def join() -> towards_nodes.Node:
            home = directory / "node"
            process = processes.enter_context(node_process(hub.url, home, [*NODE_OPTIONS, "--swarm-host", "127.0.0.1"]))
            return towards_nodes.Node(process=process, home=home)

        try:
            return await attack(hub, join)
        finally:
            await hub.end()

    directory.mkdir()
    with ExitStack() as processes:
        return _verdict(run(processes))


def _verdict(attack: Awaitable[str | Noticed], *, within_s: float | None = None) -> dict[str, Any]:
    limit_s = ENDS_WITHIN_S if within_s is None else within_s

    async def limited() -> str | Noticed:
        async with asyncio.timeout(limit_s):
            return await attack

    try:
        found = asyncio.run(limited())
    except Unnoticed as error:
        return {"detected": False, "how": str(error)}
    except TimeoutError:
        return {"detected": False, "how": f"nothing for {limit_s:.0f} s"}
    if isinstance(found, str):
        return {"detected": True, "how": found}
    return {"detected": True, "how": found.how, **found.figures}
