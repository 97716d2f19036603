"""Loads on a hub, one after the other: each row says how the hub noticed, and how it answered meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from benchmarks.backends.cases import lacks
from benchmarks.harness.progress import Planned, Progress
from benchmarks.harness.site import Settings, merged, open_site
from benchmarks.trust.loads import ON_HUB, ON_TLS_HUB, Attack, tls_settings
from benchmarks.trust.victim import Unnoticed, Victim, attacked

ENDS_WITHIN_S: Final = 150.0
WARM_UP_STEPS: Final = 20
"""Steps after which the hub's memory does not grow by itself."""
WARM_UP_S: Final = 600.0
MOST_LOG_BYTES: Final = 256 * 1024
"""Growth of all logs of the hub that one attack may cause."""
NODE_OPTIONS: Final = ("--backend", "llama_cpp", "--precision", "f32")
ELSEWHERE: Final = ("nice", "-n", "10")
"""Nodes have machines of their own, so hub, learner and verifier go before them on this machine."""
SETTINGS: Final[Settings] = {
    "run": {"name": "trust"},
    "training": {"steps": 100_000},
    "learner": {"threads": 1, "checkpoint_every": 50},
    "sampling": {"max_tokens": 6},
    "evaluation": {"problems": 1},
    "leases": {"deadline_s": 10.0},
    "server": {"port": 0, "shared_memory": False},
}


def plan() -> list[Planned]:
    missing = lacks("llama_cpp", "f32")
    return [
        *(Planned(name=name, seconds=10, lacks=missing) for name in ON_HUB),
        *(Planned(name=name, seconds=20) for name in ON_TLS_HUB),
    ]


def measure(scratch: Path, progress: Progress, *, seed: int) -> list[dict[str, Any]]:
    """Measure the wanted attacks, one row for each. All attacks of a kind meet the same hub, with what earlier attacks
    left behind."""
    rows = []
    settings = merged(SETTINGS, {"run": {"seed": seed}})
    if any(progress.wants(name) for name in ON_HUB):
        with open_site(scratch / "attacked", settings, verbose=True) as site, attacked(site) as victim:
            site.node(NODE_OPTIONS, within=ELSEWHERE)
            site.wait_for_step(WARM_UP_STEPS, within_s=WARM_UP_S)
            rows += _each(victim, ON_HUB, progress)
    if any(progress.wants(name) for name in ON_TLS_HUB):
        tls = tls_settings(scratch)
        with (
            open_site(scratch / "tls", merged(settings, {"server": tls}), verbose=True) as site,
            attacked(site, certificate=tls["tls_certificate"]) as victim,
        ):
            rows += _each(victim, ON_TLS_HUB, progress)
    return rows


def headline(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the worst delay and growth of all attacks, or None if no attack was measured."""
    names = ("stall_s", "rss_growth_mb", "log_kb")
    return {f"{name}_worst": max((row[name] for row in rows), default=None) for name in names}


def _each(victim: Victim, attacks: Mapping[str, Attack], progress: Progress) -> list[dict[str, Any]]:
    rows = []
    for name, attack in attacks.items():
        if progress.wants(name):
            rows.append({"case": name, **_attacked(victim, attack)})
            progress.done(name, {"detected": rows[-1]["detected"], "how": rows[-1]["how"]})
    return rows


def _attacked(victim: Victim, attack: Attack) -> dict[str, Any]:
    began_at = time.monotonic()
    with victim.watched() as health:
        row = verdict(victim, attack)
    if health.log_bytes > MOST_LOG_BYTES or not health.is_log_plain:
        plain = "plain" if health.is_log_plain else "not plain"
        row |= {"detected": False, "how": f"the log is {plain}, {health.log_bytes} bytes more; {row['how']}"}
    return {
        **row,
        "stall_s": health.stall_s,
        "rss_growth_mb": health.growth_bytes / 1e6,
        "log_kb": health.log_bytes / 1e3,
        "seconds": time.monotonic() - began_at,
    }


def verdict(victim: Victim, attack: Attack, *, within_s: float = ENDS_WITHIN_S) -> dict[str, Any]:
    """Carry out an attack. `detected` is False for a successful or unfinished attack."""

    async def limited() -> str | tuple[str, dict[str, float]]:
        async with asyncio.timeout(within_s):
            return await attack(victim)

    try:
        found = asyncio.run(limited())
    except Unnoticed as error:
        return {"detected": False, "how": str(error)}
    except TimeoutError:
        return {"detected": False, "how": f"nothing for {within_s:.0f} s"}
    how, figures = (found, {}) if isinstance(found, str) else found
    return {"detected": True, "how": how, **figures}
