"""Measurements of pages, each in a browser profile of its own: first load, live delay, memory, the hub's processor."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import shutil
import statistics
import subprocess
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import aiohttp
from playwright.async_api import Browser, CDPSession, Page

from benchmarks.harness.site import Site
from benchmarks.pages.browsing import MODES, PATIENCE_S, SETTLED_MS, counted, opened

VERSION: Final = "4.14.1"
SHA512: Final = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
"""Hash of the package, in npm's form."""
SCRIPT: Final = "package/axe.min.js"
RUN: Final = "async () => (await axe.run({ resultTypes: ['violations'] })).violations"


def lacks() -> str:
    """Why this machine cannot run axe-core; empty if it can."""
    return "" if shutil.which("npm") else "npm, which fetches axe-core"


def fetched(scratch: Path) -> str:
    """Fetch the script with npm. Raises ValueError if it is not the pinned release."""
    command = ["npm", "pack", "--silent", f"axe-core@{VERSION}"]
    subprocess.run(command, cwd=scratch, check=True, capture_output=True)
    package = scratch / f"axe-core-{VERSION}.tgz"
    found = base64.b64encode(hashlib.sha512(package.read_bytes()).digest()).decode()
    if found != SHA512:
        raise ValueError(f"{package.name} is not the pinned release: its SHA-512 is {found}")
    with tarfile.open(package) as archive:
        content = archive.extractfile(SCRIPT)
        assert content is not None
        return content.read().decode()


def found_on(violations: list[Mapping[str, Any]]) -> dict[str, int]:
    """Count elements that violate rules, by impact. Critical violations count as serious."""
    counts = {"serious": 0, "moderate": 0, "minor": 0}
    for violation in violations:
        impact = "serious" if violation["impact"] == "critical" else violation["impact"]
        counts[impact] += len(violation["nodes"])
    return counts


def said_of(violations: list[Mapping[str, Any]]) -> list[str]:
    """Describe each violated rule, with the first element that violates it."""
    return [
        f"{violation['impact']}: {violation['id']}: {violation['nodes'][0]['target']} ({len(violation['nodes'])})"
        for violation in violations
    ]


STEPS_WATCHED: Final = 20
PAIRS: Final = 6
PAINTED: Final = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"
NOTE_STEPS: Final = """() => {
  const seen = (window.seenSteps = []);
  const note = () => seen.push([Number(document.getElementById('step').textContent.replaceAll(',', '')), Date.now()]);
  note();
  new MutationObserver(note).observe(document.getElementById('now'), { childList: true, subtree: true });
}"""
STREAMS_S: Final = 5.0
"""Seconds within which a page opens its stream of live figures."""
COLLECTED_MS: Final = 1_000
SNAPSHOT: Final = "echo_pages_snapshot_seconds "
STALE_WITHIN_MS: Final = 90_000.0


async def every_page(browser: Browser, site: Site, pages: Mapping[str, str], script: str) -> list[dict[str, Any]]:
    """Run axe-core on each page in each mode."""
    rows = []
    for mode in MODES:
        for name, path in pages.items():
            async with opened(browser, site, mode, operator=name != "/login") as context:
                page = await context.new_page()
                await page.goto(site.url + path)
                await page.wait_for_timeout(SETTLED_MS)
                await page.evaluate(script)
                violations = await page.evaluate(RUN)
                counts = found_on(violations)
                rows.append(
                    {
                        "page": name,
                        "mode": mode,
                        **{f"axe_{impact}": count for impact, count in counts.items()},
                        "findings": said_of(violations),
                    }
                )
    return rows


async def first_load(browser: Browser, site: Site, pages: Mapping[str, str]) -> list[dict[str, Any]]:
    """Count what each page loads at its first visit, until nothing more is loaded."""
    rows = []
    for name, path in pages.items():
        async with opened(browser, site, "light", operator=name != "/login") as context:
            page = await context.new_page()
            loaded = await counted(page, site)
            answer = await page.goto(site.url + path)
            await page.wait_for_timeout(SETTLED_MS)
            policy = answer.headers.get("content-security-policy", "") if answer else ""
            painted_ms = await page.evaluate(PAINTED)
            rows.append(
                {
                    "page": name,
                    "first_contentful_paint_s": None if painted_ms is None else painted_ms / 1000,
                    "transfer_kb": loaded.transfer_bytes / 1000,
                    "requests": len(loaded.urls),
                    "external_requests": len(loaded.external),
                    "csp_unsafe": policy.count("unsafe-")
                    + ("default-src 'none'" not in policy)
                    + len(loaded.violations),
                    "complaints": loaded.violations,
                }
            )
    return rows


async def live(browser: Browser, site: Site) -> list[dict[str, Any]]:
    """Measure the time from a step in the database to a page that shows it or a later step."""
    first = site.newest_step() + 1
    async with opened(browser, site, "light") as context:
        page = await context.new_page()
        await page.goto(site.url)
        await page.evaluate(NOTE_STEPS)
        await asyncio.to_thread(site.wait_for_step, first + STEPS_WATCHED, within_s=PATIENCE_S)
        shown = "last => window.seenSteps.at(-1)[0] >= last"
        await page.wait_for_function(shown, arg=first + STEPS_WATCHED - 1, timeout=STALE_WITHIN_MS)
        seen = await page.evaluate("() => window.seenSteps")
    query = "SELECT step, trained_at FROM steps WHERE step BETWEEN ? AND ? AND trained_at IS NOT NULL"
    delays = [
        min(at for shown, at in seen if shown >= step) / 1000 - trained_at
        for step, trained_at in site.rows(query, first, first + STEPS_WATCHED - 1)
    ]
    median = statistics.median(delays)
    return [{"live_delay_s": max(delays), "live_delay_s_median": median, "steps": len(delays)}]


async def snapshots(site: Site) -> list[dict[str, Any]]:
    """Read the hub's own figure of the time for one picture of the run."""
    took: list[float] = []
    headers = {"Authorization": f"Bearer {site.token}"}
    async with aiohttp.ClientSession(site.url, headers=headers) as http:
        for _ in range(STEPS_WATCHED):
            async with http.get("/metrics") as answer:
                text = await answer.text()
            took += [float(line.split()[1]) for line in text.splitlines() if line.startswith(SNAPSHOT)]
            await asyncio.sleep(1.0)
    found = {"snapshot_ms": 1000 * statistics.median(took), "snapshot_ms_worst": 1000 * max(took)}
    return [{**found, "snapshots": len(took)}]


async def hub_cpu(browser: Browser, site: Site, *, seconds: float) -> list[dict[str, Any]]:
    """Compare the hub's processor time with and without a watched page, in pairs of `seconds` each; the median."""
    shares = []
    async with opened(browser, site, "light") as context:
        page = await context.new_page()
        for number in range(PAIRS):
            found = {}
            for watched in (True, False) if number % 2 else (False, True):
                await page.goto(site.url if watched else "about:blank")
                await page.wait_for_timeout(1000 * STREAMS_S)
                before = site.processor_s()
                await page.wait_for_timeout(1000 * seconds)
                found[watched] = (site.processor_s() - before) / seconds
            shares.append(found[True] - found[False])
    return [{"hub_cpu_share": statistics.median(shares), "hub_cpu_share_of_pairs": [round(one, 4) for one in shares]}]


async def lasting(browser: Browser, site: Site, *, seconds: float) -> list[dict[str, Any]]:
    """Compare the memory of a watched page early (a tenth of the time) and late."""
    async with opened(browser, site, "light") as context:
        page = await context.new_page()
        protocol = await context.new_cdp_session(page)
        await page.goto(site.url)
        await page.wait_for_timeout(100 * seconds)
        heap = await _heap_bytes(page, protocol)
        await page.wait_for_timeout(900 * seconds)
        heap_then = await _heap_bytes(page, protocol)
    return [{"page_memory_growth": heap_then / heap, "page_memory_mb": heap_then / 1e6, "watched_s": seconds}]


async def _heap_bytes(page: Page, protocol: CDPSession) -> float:
    """Heap bytes after garbage collection."""
    await protocol.send("HeapProfiler.collectGarbage")
    await page.wait_for_timeout(COLLECTED_MS)
    await protocol.send("HeapProfiler.collectGarbage")
    await protocol.send("Performance.enable")
    metrics = {one["name"]: one["value"] for one in (await protocol.send("Performance.getMetrics"))["metrics"]}
    return float(metrics["JSHeapUsedSize"])
