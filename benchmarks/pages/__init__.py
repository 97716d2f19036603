"""The hub's pages in Chromium: accessibility, time to show, weight, delay of live figures, memory.

The hub trains, two real nodes work for it, and its database is that of a long run: 5,000 nodes and 10⁶ rollouts
(`benchmarks.harness.books`). Pages are found by following links; of pages whose addresses differ only in ids, one is
measured.

- `axe_serious`, `axe_moderate`: number of elements that violate rules of axe-core, summed over all pages in light, dark
  and phone mode.
- `first_contentful_paint_s`, `transfer_kb`: the worst page at its first visit. `external_requests`, `csp_unsafe`: sums
  over all pages.
- `live_delay_s`: delay from a step in the database to its display on the page, worst of twenty.
- `page_memory_growth`: heap of an open page after ten minutes, divided by its heap after one minute.
- `hub_cpu_share`: additional processor time of the hub for one open page, as a share of one core.
- `snapshot_ms`: the hub's median time for one picture of the run, that is, the data that the pages show.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
import shutil
import statistics
import subprocess
import tarfile
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
from playwright.async_api import Browser, BrowserContext, CDPSession, ConsoleMessage, Page, async_playwright

from benchmarks.harness.books import Amount, fill
from benchmarks.harness.progress import Measurement, Planned, Progress, most
from benchmarks.harness.site import Settings, Site, merged, open_site, serving
from echo_hub.store.database import connect

DESCRIPTION: Final = "The hub's pages in a browser: accessibility, size, speed, delay of live figures, memory growth"

NODES_AT_WORK: Final = 2
STEPS_BEFORE: Final = 8
"""Number of real training steps before the database is filled with generated rows. So each table also has some genuine
rows.
"""
PATIENCE_S: Final = 300.0
ELSEWHERE: Final = ("nice", "-n", "19")
"""Prefix of the nodes' commands: hub and learner have priority on the shared processor."""
SETTINGS: Final[Settings] = {
    "run": {"name": "pages"},
    "training": {"steps": 100_000},
    "learner": {"checkpoint_every": 5},
    "evaluation": {"problems": 16},
}


@contextmanager
def filled_site(scratch: Path, *, nodes: int, rollouts: int, seed: int) -> Iterator[Site]:
    """Run a hub with two working nodes, whose database has this many nodes and rollouts, during the block."""
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


CHROMIUM: Final = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS: Final = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--enable-precise-memory-info"),
)
MODES: Final[Mapping[str, Mapping[str, Any]]] = {
    "light": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light", "has_touch": True, "is_mobile": True},
}
SETTLED_MS: Final = 1_500
"""Milliseconds to wait after a page has loaded, before its figures are read."""
MOST_SHAPES: Final = 60


@asynccontextmanager
async def chromium() -> AsyncIterator[Browser]:
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        try:
            yield browser
        finally:
            await browser.close()


@asynccontextmanager
async def opened(browser: Browser, site: Site, mode: str, *, operator: bool = True) -> AsyncIterator[BrowserContext]:
    """Open a new browser profile, with the operator logged in or not."""
    context = await browser.new_context(**MODES[mode])
    try:
        if operator:
            await context.request.get(f"{site.url}/?token={site.token}")
        yield context
    finally:
        await context.close()


def shape(path: str) -> str:
    """Return the path with a star for each number and id: /rollouts/17 becomes /rollouts/*."""
    parts = path.partition("?")[0].split("/")
    return "/".join("*" if re.fullmatch(r"[0-9a-f-]*[0-9][0-9a-f-]*", part) else part for part in parts)


async def pages_of(context: BrowserContext, site: Site) -> dict[str, str]:
    """Follow the hub's links. Return one path for each shape (path with ids replaced by a star), and the login page."""
    found, waiting, asked = {"/login": "/login"}, ["/", "/leaderboard"], set[str]()
    page = await context.new_page()
    while waiting and len(found) < MOST_SHAPES:
        path = waiting.pop(0)
        if shape(path) in asked:
            continue
        asked.add(shape(path))
        answer = await context.request.get(site.url + path)
        if not answer.ok or "text/html" not in answer.headers.get("content-type", ""):
            continue
        found[shape(path)] = path
        await page.goto(site.url + path)
        links = await page.evaluate("() => [...document.querySelectorAll('a[href]')].map((one) => one.href)")
        waiting += [link.removeprefix(site.url).partition("#")[0] for link in links if link.startswith(f"{site.url}/")]
    await page.close()
    return found


VERSION: Final = "4.14.1"
SHA512: Final = "FHfa+lmNjQZfJz1q8wKqIDwC6DExcHt/pkjNQb09a3NPjCKg2rhu5qb2S4r76ASyFNNtuFooJpZe37OgudVGtQ=="
"""SHA-512 hash of axe-core's package, as npm writes it."""
SCRIPT: Final = "package/axe.min.js"
RUN: Final = "async () => (await axe.run({ resultTypes: ['violations'] })).violations"


def fetched(scratch: Path) -> str:
    """Fetch axe-core's script with npm; return its text. Raises ValueError if the package is not the pinned release."""
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
    """Count the elements that violate rules, by impact. Critical violations count as serious."""
    counts = {"serious": 0, "moderate": 0, "minor": 0}
    for violation in violations:
        impact = "serious" if violation["impact"] == "critical" else violation["impact"]
        counts[impact] += len(violation["nodes"])
    return counts


def said_of(violations: list[Mapping[str, Any]]) -> list[str]:
    """Return each violation as text: impact, rule, first element, number of elements."""
    return [f"{one['impact']}: {one['id']}: {one['nodes'][0]['target']} ({len(one['nodes'])})" for one in violations]


def to_other_hosts(urls: Iterable[str], own: str) -> list[str]:
    """Return the requested addresses that are not the hub's. `own` is the hub's address."""
    return [url for url in urls if urlsplit(url).scheme in ("http", "https") and not url.startswith(own)]


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
METRIC: Final = "echo_pages_snapshot_seconds "
STALE_WITHIN_MS: Final = 90_000.0


async def every_page(browser: Browser, site: Site, pages: Mapping[str, str], script: str) -> list[dict[str, Any]]:
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
    """Load each page in a new browser profile, and return its figures."""
    rows = []
    for name, path in pages.items():
        async with opened(browser, site, "light", operator=name != "/login") as context:
            rows.append({"page": name, **await _first_visit(await context.new_page(), site, path)})
    return rows


async def _first_visit(page: Page, site: Site, path: str) -> dict[str, Any]:
    """Load a page and wait until it has settled. Return its requests, and the errors that the browser reported."""
    urls: list[str] = []
    sizes: list[int] = []
    complaints: list[str] = []

    def heed(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            complaints.append(message.text)

    protocol = await page.context.new_cdp_session(page)
    await protocol.send("Network.enable")
    protocol.on("Network.loadingFinished", lambda event: sizes.append(event["encodedDataLength"]))
    protocol.on("Network.requestWillBeSent", lambda event: urls.append(event["request"]["url"]))
    page.on("console", heed)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    answer = await page.goto(site.url + path)
    await page.wait_for_timeout(SETTLED_MS)
    policy = answer.headers.get("content-security-policy", "") if answer else ""
    painted_ms = await page.evaluate(PAINTED)
    return {
        "first_contentful_paint_s": None if painted_ms is None else painted_ms / 1000,
        "transfer_kb": sum(sizes) / 1000,
        "requests": len(urls),
        "external_requests": len(to_other_hosts(urls, site.url)),
        "csp_unsafe": policy.count("unsafe-") + ("default-src 'none'" not in policy) + len(complaints),
        "complaints": complaints,
    }


async def live(browser: Browser, site: Site) -> list[dict[str, Any]]:
    """Measure the delay from the commit of a step to the moment when a page shows this step or a later one."""
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
    """Return the hub's own measurement of the time for one picture of the run (the data that the pages show)."""
    took: list[float] = []
    headers = {"Authorization": f"Bearer {site.token}"}
    async with aiohttp.ClientSession(site.url, headers=headers) as http:
        for _ in range(STEPS_WATCHED):
            async with http.get("/metrics") as answer:
                text = await answer.text()
            took += [float(line.split()[1]) for line in text.splitlines() if line.startswith(METRIC)]
            await asyncio.sleep(1.0)
    found = {"snapshot_ms": 1000 * statistics.median(took), "snapshot_ms_worst": 1000 * max(took)}
    return [{**found, "snapshots": len(took)}]


async def hub_cpu(browser: Browser, site: Site, *, seconds: float) -> list[dict[str, Any]]:
    """Compare the hub's processor time with and without an open page, in pairs of `seconds` each. Return the median of
    the difference.
    """
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
    """Keep a page open for `seconds`. Compare its memory at the end with its memory after a tenth of the time."""
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
    await protocol.send("HeapProfiler.collectGarbage")
    await page.wait_for_timeout(COLLECTED_MS)
    await protocol.send("HeapProfiler.collectGarbage")
    await protocol.send("Performance.enable")
    metrics = {one["name"]: one["value"] for one in (await protocol.send("Performance.getMetrics"))["metrics"]}
    return float(metrics["JSHeapUsedSize"])


NODES: Final = 5_000
ROLLOUTS: Final = 1_000_000
LASTING_S: Final = 600.0
CPU_S: Final = 20.0
AXE, LOAD, LIVE, SNAPSHOT, CPU, LASTING = (
    *("accessibility", "first load", "live", "snapshot", "hub's processor", "ten minutes"),
)


def plan() -> list[Planned]:
    lacks = "" if CHROMIUM else "Chromium"
    lacks_axe = "" if shutil.which("npm") else "npm, which fetches axe-core"
    return [
        Planned(name=LOAD, seconds=40, lacks=lacks),
        Planned(name=AXE, seconds=120, lacks=lacks or lacks_axe),
        Planned(name=LIVE, seconds=60, lacks=lacks),
        Planned(name=SNAPSHOT, seconds=30),
        Planned(name=CPU, seconds=320, lacks=lacks),
        Planned(name=LASTING, seconds=LASTING_S, lacks=lacks),
    ]


def measure(seed: int, progress: Progress, *, scale: float = 1.0) -> Measurement:
    """Measure all wanted cases. `scale` multiplies the numbers of nodes and rollouts, and the durations."""
    sizes = {"nodes": max(20, round(scale * NODES)), "rollouts": max(1_000, round(scale * ROLLOUTS))}
    rows: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory(prefix="echo-pages-") as scratch,
        filled_site(Path(scratch), **sizes, seed=seed) as site,
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

    await take(SNAPSHOT, lambda: snapshots(site))
    if CHROMIUM is None:
        return
    async with chromium() as browser:
        async with opened(browser, site, "light") as context:
            pages = await pages_of(context, site)
        await take(LOAD, lambda: first_load(browser, site, pages))
        await take(AXE, lambda: every_page(browser, site, pages, fetched(scratch)))
        await take(LIVE, lambda: live(browser, site))
        await take(CPU, lambda: hub_cpu(browser, site, seconds=scale * CPU_S))
        await take(LASTING, lambda: lasting(browser, site, seconds=scale * LASTING_S))


def _told(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return what is printed for a case: the worst value of each figure over `rows`, and the violations that axe-core
    found.
    """
    names = dict.fromkeys(name for row in rows for name, value in row.items() if isinstance(value, (int, float)))
    findings = sorted({f"{row['page']}: {found}" for row in rows for found in row.get("findings", ())})
    return {**{name: most(rows, name) for name in names}, **({"findings": findings} if findings else {})}


def headline(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the headline figures: sums of violations and errors over pages and modes, and the worst value of each
    other figure. A figure that was not measured is None.
    """
    faults = {
        name: sum(row[name] for row in rows if name in row) if any(name in row for row in rows) else None
        for name in ("axe_serious", "axe_moderate", "external_requests", "csp_unsafe")
    }
    names = ("first_contentful_paint_s", "transfer_kb", "live_delay_s", "page_memory_growth", "hub_cpu_share")
    return {**faults, **{name: most(rows, name) for name in (*names, "snapshot_ms")}}
