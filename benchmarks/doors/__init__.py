"""Programs of tenants (users of the hub's API) against a whole hub with two nodes: unmodified recipes of the tinker
cookbook, own programs for the tinker SDK, and kills of every process.

Hub, nodes and programs are processes of this machine, and the base has 0.8 M parameters. So messages and processes, not
the model, take most of the time.

- `rl_loop_steps_per_min`: steps of the cookbook's rl_loop with 4 groups of 4 samples, which two nodes draw and the hub
  checks. `rl_loop_steps_per_min_hub`: the same, but the hub's own device draws the samples. The first step loads models
  and does not count.
- `sample_overhead_ms_p50`: median time of a request of one sample, minus the time from its lease to its arrival.
- `tenants_slowdown`: time of a tenant who trains and samples while another tenant does, divided by its time alone; the
  larger of the two tenants' values.
- `kills`, `requests_lost`, `applied_twice`, `rounds_changed`: hub, process of tenants' models, node and verifier are
  killed in turn while a program trains and samples. `requests_lost`: requests whose program got no result, and requests
  that still wait in the database. `applied_twice`: optimizer steps beyond those asked for. `rounds_changed`: rounds
  whose log-probabilities or tokens differ from an undisturbed repetition by a single bit.
- `concurrent_samples`, `concurrent_samples_mb`: number of requests that wait at once while there is no node and are
  answered after nodes join, and the hub's largest resident memory.
- `gradient_difference`: largest difference of a gradient from plain PyTorch's over all losses, relative to the
  gradient's largest value.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import psutil

from benchmarks.harness.live_site import LOOK_S, Running, live_site
from benchmarks.harness.progress import AsyncCase, Measurement, Planned, Progress, run_cases
from benchmarks.harness.site import RunFailed
from benchmarks.harness.tenant_site import MODELS, VERIFIER, TenantSite, found, lacking

DESCRIPTION: Final = "The Tinker API on a swarm: unmodified recipes, two tenants, kills, 2,000 requests at once"
RL_STEPS: Final = 9
NUM_REQUESTS: Final = 40
ROUNDS: Final = 12
NUM_KILLS: Final = 20
NUM_HELD: Final = 2_000
ANSWERED: Final = "SELECT count(*) FROM rollouts WHERE state = 'answered'"
PROGRAMS: Final = Path(__file__).with_name("programs.py")


@asynccontextmanager
async def opened(*, drawn_by: str = "nodes", num_nodes: int = 2) -> AsyncIterator[TenantSite]:
    """Run a hub for tenants (users of its API), with `num_nodes` nodes, during the block. `drawn_by`: `nodes` or `hub`
    draw the samples.
    """
    with tempfile.TemporaryDirectory(prefix="echo-doors-") as scratch, contextlib.redirect_stdout(None):
        # When the block ends, each process prints its output, which is only for failed tests.
        async with live_site(Path(scratch)) as site:
            tenants = TenantSite(site)
            verifier = "process" if drawn_by == "nodes" else "off"
            await tenants.open(drawn_by=drawn_by, trust={"verifier": verifier})
            for number in range(num_nodes):
                await tenants.node(f"node{number + 1}")
            yield tenants


async def exists(path: Path, *, beside: Running) -> None:
    """Wait for a file that the program `beside` writes. Raises RunFailed if the program ends first."""
    while not await asyncio.to_thread(path.exists):
        await still_runs(beside)
        await asyncio.sleep(LOOK_S)


async def still_runs(program: Running) -> None:
    """Raise RunFailed if a program has ended."""
    if program.process.returncode is not None:
        raise RunFailed((await program.ended())[1][-2_000:])


async def rl_loop(seed: int, *, drawn_by: str, figure: str) -> dict[str, Any]:
    async with opened(drawn_by=drawn_by, num_nodes=2 if drawn_by == "nodes" else 0) as tenants:
        recipe = await tenants.recipe(
            await tenants.key(),
            "rl_loop",
            "rl",
            loss_fn="importance_sampling",
            batch_size=4,
            group_size=4,
            max_tokens=16,
            lora_rank=8,
            learning_rate=1e-3,
            max_steps=RL_STEPS,
        )
        await found(recipe)
        metrics = tenants.metrics("rl")
        seconds = [step["time/total"] for step in metrics[1:]]
        return {
            figure: 60.0 / statistics.fmean(seconds),
            "reward_first": metrics[0]["reward/total"],
            "reward_last": metrics[-1]["reward/total"],
            "answered": tenants.rows(ANSWERED)[0][0],
            "checked": tenants.rows(f"{ANSWERED} AND checked = 'passed'")[0][0],
        }


async def overhead(seed: int) -> dict[str, Any]:
    async with opened() as tenants:
        asked = await found(await tenants.program(await tenants.key(), PROGRAMS, "requests", NUM_REQUESTS))
        leases = tenants.rows(
            "SELECT received_at - leased_at FROM rollouts WHERE state = 'answered' ORDER BY group_id, lease_id"
        )
        if len(leases) != len(asked["seconds"]):
            raise RunFailed(f"{len(leases)} answered rollouts for {len(asked['seconds'])} requests")
        over = [1000 * (whole - leased) for whole, (leased,) in zip(asked["seconds"], leases, strict=True)]
        return {
            "sample_overhead_ms_p50": statistics.median(over),
            "sample_overhead_ms_max": max(over),
            "lease_ms_p50": 1000 * statistics.median(leased for (leased,) in leases),
        }


async def _seconds(tenants: TenantSite, keys: Mapping[str, str], name: str) -> dict[str, float]:
    """Let the programs of these tenants (`programs.work`) train and sample at the same time; return the seconds that
    each took.
    """
    go, programs = tenants.site.root / f"{name}.go", {}
    for tenant, key in keys.items():
        ready = tenants.site.root / f"{name}-{tenant}.ready"
        programs[tenant] = await tenants.program(key, PROGRAMS, "work", ROUNDS, ready, go)
        await exists(ready, beside=programs[tenant])
    go.touch()
    return {tenant: float((await found(program))["seconds"]) for tenant, program in programs.items()}


async def two_tenants(seed: int) -> dict[str, Any]:
    async with opened() as tenants:
        keys = {tenant: await tenants.key(tenant) for tenant in ("ada", "bob")}
        # Not counted: the first work waits until nodes and hub have loaded their models.
        await _seconds(tenants, {"ada": keys["ada"]}, "first")
        alone = {
            tenant: (await _seconds(tenants, {tenant: key}, f"alone-{tenant}"))[tenant] for tenant, key in keys.items()
        }
        both = await _seconds(tenants, keys, "both")
        slowdowns = {tenant: both[tenant] / alone[tenant] for tenant in keys}
        return {"tenants_slowdown": max(slowdowns.values()), "alone_s": alone, "both_s": both}


async def kills(seed: int) -> dict[str, Any]:
    async with opened() as tenants:
        done, stop = tenants.site.root / "rounds", tenants.site.root / "stop"
        program = await tenants.program(await tenants.key(), PROGRAMS, "endure", done, stop)
        await exists(done, beside=program)
        for number in range(NUM_KILLS):
            blows: tuple[Callable[[], Awaitable[None]], ...] = (
                tenants.kill_hub,
                partial(tenants.kill_module, MODELS),
                partial(tenants.kill_node, f"node{1 + number // 4 % 2}"),
                partial(tenants.kill_module, VERIFIER),
            )
            await blows[number % 4]()
            before = int(done.read_text() or 0)
            while int(done.read_text() or 0) < before + 1:
                await still_runs(program)
                await asyncio.sleep(LOOK_S)
        stop.touch()
        seen = await found(program)
        waiting = tenants.rows("SELECT count(*) FROM tenant_requests WHERE state = 'waiting'")[0][0]
        steps = tenants.rows("SELECT steps FROM tenant_models ORDER BY made_at LIMIT 1")[0][0]
        return {
            "kills": NUM_KILLS,
            "requests": seen["asked"],
            "requests_lost": seen["lost"] + waiting,
            "applied_twice": steps - seen["rounds"],
            "rounds": seen["rounds"],
            "rounds_changed": seen["changed"],
        }


async def concurrent(seed: int) -> dict[str, Any]:
    async with opened(num_nodes=0) as tenants:
        program = await tenants.program(await tenants.key(), PROGRAMS, "held", NUM_HELD)
        waiting, most_bytes, hub = 0, 0, tenants.hub_process()
        while waiting < NUM_HELD:
            waiting = tenants.rows("SELECT count(*) FROM tenant_requests WHERE state = 'waiting'")[0][0]
            most_bytes = max(most_bytes, hub.memory_info().rss)
            await still_runs(program)
            await asyncio.sleep(0.1)
        for name in ("node1", "node2"):
            await tenants.node(name)
        watch = asyncio.create_task(_most_memory(hub))
        seen = await found(program)
        watch.cancel()
        most_bytes = max(most_bytes, await watch)
        return {
            "concurrent_samples": seen["samples"],
            "concurrent_samples_mb": most_bytes / 1e6,
            "concurrent_samples_s": seen["seconds"],
        }


async def _most_memory(process: psutil.Process) -> int:
    """Watch the process until this task is cancelled; then return its largest resident memory in bytes."""
    most = 0
    try:
        while True:
            most = max(most, process.memory_info().rss)
            await asyncio.sleep(0.1)
    except asyncio.CancelledError:
        return most


async def losses(seed: int) -> dict[str, Any]:
    from benchmarks.doors.losses import gradient_differences  # Loads PyTorch, which no other case needs here.

    with tempfile.TemporaryDirectory(prefix="echo-doors-") as scratch:
        differences = await asyncio.to_thread(gradient_differences, Path(scratch), seed)
    return {"gradient_difference": max(differences.values()), **differences}


CASES: Final[Mapping[str, AsyncCase]] = {
    "losses": (losses, 15),
    "rl_loop by nodes": (partial(rl_loop, drawn_by="nodes", figure="rl_loop_steps_per_min"), 60),
    "rl_loop by hub": (partial(rl_loop, drawn_by="hub", figure="rl_loop_steps_per_min_hub"), 45),
    "overhead": (overhead, 40),
    "two tenants": (two_tenants, 120),
    "concurrent": (concurrent, 60),
    "kills": (kills, 240),
}
"""Cases by name, each a function that measures it and the expected seconds on two idle cores."""
HEADLINE: Final = (
    "rl_loop_steps_per_min",
    "rl_loop_steps_per_min_hub",
    "sample_overhead_ms_p50",
    "tenants_slowdown",
    "kills",
    "requests_lost",
    "applied_twice",
    "rounds_changed",
    "concurrent_samples",
    "concurrent_samples_mb",
    "gradient_difference",
)


def plan() -> list[Planned]:
    lacks = lacking()
    return [
        Planned(name=name, seconds=seconds, lacks="" if name == "losses" else lacks)
        for name, (_, seconds) in CASES.items()
    ]


def headline(cases: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    return {name: value for case in cases.values() for name, value in case.items() if name in HEADLINE}


def measure(seed: int, progress: Progress) -> Measurement:
    """Measure all wanted cases, each on a separate hub."""
    return run_cases(CASES, seed, progress, headline)
