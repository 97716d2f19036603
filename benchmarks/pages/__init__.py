"""The hub's pages in Chromium: accessibility, time to show, weight, delay of live figures, memory.

The hub trains, two real nodes work for it, and its database is that of a long run: 5,000 nodes and 10⁶ rollouts
(`benchmarks.harness.books`). Pages are found by their links, one of each shape.

- `axe_serious`, `axe_moderate`: elements that violate rules of axe-core, summed over all pages, light, dark and phone.
- `first_contentful_paint_s`, `transfer_kb`: the worst page at its first visit. `external_requests`, `csp_unsafe`: sums
  over all pages.
- `live_delay_s`: delay from a database step to its display on the page, worst of twenty.
- `page_memory_growth`: heap of a watched page after ten minutes, over that after one minute.
- `hub_cpu_share`: additional processor time of the hub for one watched page, as a share of one core.
- `snapshot_ms`: the hub's time for one picture of the run, the median.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.progress import Measurement, Planned, Progress
from benchmarks.harness.site import Site
from benchmarks.pages import looks

DESCRIPTION: Final = "The hub's pages in a browser: accessibility, weight, speed, how live and how lasting they are"
NODES: Final = 5_000
ROLLOUTS: Final = 1_000_000
LASTING_S: Final = 600.0
CPU_S: Final = 20.0
AXE, LOAD, LIVE, SNAPSHOT, CPU, LASTING = (
    *("accessibility", "first load", "live", "snapshot", "hub's processor", "ten minutes"),
)


def plan() -> list[Planned]:
    lacks = looks.lacks_browser()
    return [
        Planned(name=LOAD, seconds=40, lacks=lacks),
        Planned(name=AXE, seconds=120, lacks=lacks or looks.lacks()),
        Planned(name=LIVE, seconds=60, lacks=lacks),
        Planned(name=SNAPSHOT, seconds=30),
        Planned(name=CPU, seconds=320, lacks=lacks),
        Planned(name=LASTING, seconds=LASTING_S, lacks=lacks),
    ]


def measure(seed: int, progress: Progress, *, scale: float = 1.0) -> Measurement:
    """Measure with sizes and durations multiplied by `scale`."""
    sizes = {"nodes": max(20, round(scale * NODES)), "rollouts": max(1_000, round(scale * ROLLOUTS))}
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="echo-pages-") as scratch,
        looks.filled_site(Path(scratch), **sizes, seed=seed) as site,
    ):
        asyncio.run(_look(site, progress, rows, Path(scratch), scale))
    return Measurement(headline=headline(rows), rows=rows, conditions=dict[str, Any](sizes))


async def _look(site: Site, progress: Progress, rows: list[dict[str, Any]], scratch: Path, scale: float) -> None:
    async def take(name: str, case: Callable[[], Awaitable[list[dict[str, Any]]]]) -> None:
        if progress.wants(name):
            found = await case()
            rows.extend({"case": name, **row} for row in found)
            progress.so_far = Measurement(headline=headline(rows), rows=rows)
            progress.done(name, _told(found))

    await take(SNAPSHOT, lambda: looks.snapshots(site))
    if looks.lacks_browser():
        return
    async with looks.chromium() as browser:
        async with looks.opened(browser, site, "light") as context:
            pages = await looks.pages_of(context, site)
        await take(LOAD, lambda: looks.first_load(browser, site, pages))
        await take(AXE, lambda: looks.every_page(browser, site, pages, looks.fetched(scratch)))
        await take(LIVE, lambda: looks.live(browser, site))
        await take(CPU, lambda: looks.hub_cpu(browser, site, seconds=scale * CPU_S))
        await take(LASTING, lambda: looks.lasting(browser, site, seconds=scale * LASTING_S))


def _told(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the worst of each figure, and the violations that axe-core found."""
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, (int, float)))
    findings = sorted({f"{row['page']}: {found}" for row in rows for found in row.get("findings", ())})
    return {**{name: _worst(rows, name) for name in names}, **({"findings": findings} if findings else {})}


def _worst(rows: Sequence[Mapping[str, Any]], name: str) -> float | None:
    return max((row[name] for row in rows if row.get(name) is not None), default=None)


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum faults over pages and modes, and take the worst of the other figures. None: not measured."""
    faults = {
        name: sum(row[name] for row in rows if name in row) if any(name in row for row in rows) else None
        for name in ("axe_serious", "axe_moderate", "external_requests", "csp_unsafe")
    }
    names = ("first_contentful_paint_s", "transfer_kb", "live_delay_s", "page_memory_growth", "hub_cpu_share")
    return {**faults, **{name: _worst(rows, name) for name in (*names, "snapshot_ms")}}
