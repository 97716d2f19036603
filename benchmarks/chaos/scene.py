"""The disturbed run and its processes. A process that ended is started again; nothing else helps the run."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil
from sqlalchemy import Engine, Select, func, select
from sqlalchemy.exc import OperationalError, ProgrammingError

from benchmarks.chaos.wire import Wire
from benchmarks.harness.broker import BrokerProcess, run_id_of, wait_until_taken
from benchmarks.harness.postgresql import PostgreSQL
from benchmarks.harness.site import ALONE, Settings, merged
from benchmarks.harness.small_disk import SmallDisk
from echo_hub.config.file import load_config
from echo_hub.core.trust.standing import StandingState
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.store.bulk import key_of
from echo_hub.store.database import connect
from echo_hub.store.tables import evaluations, groups, rollouts, steps, trust
from echo_shared.records.run import EvaluationKind
from echo_shared.wire.messages import ReceiptState

ROOT: Final = Path("/sys/fs/cgroup")
FREE: Final = 0.85
"""Memory limit that `squeeze` first sets for a control group, as a share of the memory that the group uses."""
ROOM_BYTES: Final = 2**20
MOST_ROOM_BYTES: Final = 2**29


class MemoryGroup:
    """A control group of Linux, which limits the memory of its processes together. `command`, put in front of another
    command, runs that command inside the group.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        is_v1 = (place / "memory.limit_in_bytes").exists()
        self._limit = place / ("memory.limit_in_bytes" if is_v1 else "memory.max")
        self._usage = place / ("memory.usage_in_bytes" if is_v1 else "memory.current")
        self._unlimited = "-1" if is_v1 else "max"

    @property
    def command(self) -> Sequence[str]:
        enter = f"import os, sys; open({str(self._place / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))"
        return (sys.executable, "-c", f"{enter}; os.execvp(sys.argv[1], sys.argv[1:])")

    def squeeze(self) -> None:
        """Set the group's limit below its current use, or slightly above it if the kernel cannot reclaim enough. The
        kernel then kills a process that asks for more. Raises OSError.
        """
        share, room = FREE, 0
        while True:
            used = int(self._usage.read_text())
            try:
                self._limit.write_text(str(int(used * share) + room))
                return
            except OSError as error:
                if error.errno != errno.EBUSY or room >= MOST_ROOM_BYTES:
                    raise
            share, room = 1.0, 2 * room or ROOM_BYTES  # The memory use may have grown since it was read.

    def release(self) -> None:
        self._limit.write_text(self._unlimited)


def lacking_memory() -> str:
    """Return why this machine cannot have a control group; "" if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "only root on Linux makes control groups"
    try:
        with memory_group():
            return ""
    except OSError as error:
        return f"no control group can be made: {error}"


@contextmanager
def memory_group() -> Iterator[MemoryGroup]:
    """Make a group for the block. Its processes must end within the block. Raises OSError."""
    base = ROOT / "memory" if (ROOT / "memory").is_dir() else ROOT
    place = base / f"echo-chaos-{os.getpid()}"
    place.mkdir()
    try:
        if not any((place / name).exists() for name in ("memory.limit_in_bytes", "memory.max")):
            raise OSError(f"{base} controls no memory")
        yield MemoryGroup(place)
    finally:
        place.rmdir()


@dataclass(frozen=True, slots=True, kw_only=True)
class Books:
    """Counts from the run's database after the run. `acknowledged` counts rollouts that the hub acknowledged to nodes.
    `quarantined` counts nodes; since all are honest, each is an error.
    """

    acknowledged: int
    lost_after_ack: int
    trained_twice: int
    identity_holds: bool
    quarantined: int


def newest_step(engine: Engine) -> int | None:
    """Return the newest trained step; None if the database does not answer or has no steps."""
    found = _first(engine, select(func.max(steps.c.step)).where(steps.c.trained_at.is_not(None)))
    return None if found is None else int(found[0] or 0)


def newest_evaluation(engine: Engine, *, of_version: int | None = None) -> tuple[int, float] | None:
    """Return (version, greedy held-out accuracy) of the newest evaluated version, or of `of_version`. Return None if
    there is no evaluation yet.
    """
    wanted = select(evaluations.c.policy_version, evaluations.c.accuracy).where(
        evaluations.c.kind == EvaluationKind.GREEDY.value
    )
    if of_version is not None:
        wanted = wanted.where(evaluations.c.policy_version == of_version)
    row = _first(engine, wanted.order_by(evaluations.c.policy_version.desc()).limit(1))
    return None if row is None else (int(row[0]), float(row[1]))


def _first(engine: Engine, wanted: Select[Any]) -> Any:
    try:
        with engine.connect() as connection:
            return connection.execute(wanted).first()
    except (OperationalError, ProgrammingError):
        return None


def check(engine: Engine, acknowledged: Collection[str]) -> Books:
    """Compare the run's database with the acknowledged rollouts. Call this after the hub has ended."""
    with engine.connect() as connection:
        rows = connection.execute(
            select(
                rollouts.c.lease_id,
                rollouts.c["index"].label("member"),
                rollouts.c.group_id,
                rollouts.c.turn,
                rollouts.c.state,
                rollouts.c.drop_reason,
                rollouts.c.final_at,
            )
        ).all()
        trained = connection.execute(select(steps.c.rollout_ids).where(steps.c.trained_at.is_not(None))).all()
        num_groups = connection.scalar(select(func.count()).select_from(groups))
        quarantined = connection.scalar(
            select(func.count()).select_from(trust).where(trust.c.state == StandingState.QUARANTINED)
        )
    by_id = {(row.lease_id, row.member): row for row in rows}
    lost = sum((row := by_id.get(key_of(one))) is None or row.state == ReceiptState.LEASED for one in acknowledged)
    members = Counter(
        (by_id[key].group_id, by_id[key].member, by_id[key].turn) for (ids,) in trained for key in map(key_of, ids)
    )
    finals = {ReceiptState.TRAINED, ReceiptState.EVALUATED, ReceiptState.DROPPED}
    ended = sum(row.state in finals for row in rows)
    in_flight = sum(row.final_at is None for row in rows)
    without_reason = sum(row.state == ReceiptState.DROPPED and row.drop_reason is None for row in rows)
    in_steps = sum(members.values())
    is_trained = sum(row.state == ReceiptState.TRAINED for row in rows)
    return Books(
        acknowledged=len(acknowledged),
        lost_after_ack=lost,
        trained_twice=sum(count - 1 for count in members.values()),
        identity_holds=bool(num_groups)
        and len(rows) == ended + in_flight
        and not without_reason
        and in_steps == is_trained,
        quarantined=int(quarantined or 0),
    )


T = TypeVar("T")

AGAIN_S: Final = 1.0
ENDS_WITHIN_S: Final = 30.0
LOOK_S: Final = 0.1
STEPS: Final = 1_000_000
"""Training steps of the run: more than it can reach."""
EVALUATED_EVERY: Final = 10
NODES: Final = 2
GATEWAYS: Final = 2
FAKETIME: Final = (
    Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1"),
    Path("/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1"),
)

SETTINGS: Final[Settings] = {
    "run": {"name": "chaos"},
    "training": {"groups_per_step": 16, "group_size": 8},
    "sampling": {"max_tokens": 6},
    "evaluation": {"problems": 512, "every": EVALUATED_EVERY},
    "learner": {"threads": 1},
    "server": {"shared_memory": False},
    "alerts": {"disk_free_bytes": 0},
}
"""The task is sums, with the smallest base model. All settings that are not here are those of `echo-hub init`."""


class Kept:
    """A hub's, gateway's or node's process, which is started again a moment after it ends."""

    def __init__(self, name: str, command: Sequence[str], *, env: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._command = command
        self._env = {**os.environ, **env}
        self._log = log
        self.process: asyncio.subprocess.Process | None = None
        self.num_starts = 0

    async def run(self) -> None:
        """Restart the process whenever it ends. When cancelled, terminate it, and kill it if it ignores the signal."""
        try:
            while True:
                self.num_starts += 1
                with self._log.open("ab") as log:
                    self.process = await asyncio.create_subprocess_exec(
                        *self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._env
                    )
                await self.process.wait()
                await asyncio.sleep(AGAIN_S)
        finally:
            await self._end()

    async def _end(self) -> None:
        process = self.process
        if process is None or process.returncode is not None:
            return
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(ENDS_WITHIN_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()

    def found(self, module: str = "") -> psutil.Process | None:
        """Find the process, or its newest descendant that runs `module`; return None if there is none."""
        if self.process is None or self.process.returncode is not None:
            return None
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.process.pid)
            if not module:
                return own
            below = [one for one in own.children(recursive=True) if _runs(one, module)]
            return max(below, key=psutil.Process.create_time, default=None)
        return None

    def kill(self, module: str = "") -> bool:
        """Kill the process, or its descendant that runs this module. Return False if there is none."""
        return self.signal(signal.SIGKILL, module)

    def signal(self, number: int, module: str = "") -> bool:
        process = self.found(module)
        if process is None:
            return False
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)
            return True
        return False


def _runs(process: psutil.Process, module: str) -> bool:
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
        return module in process.cmdline() and process.status() != psutil.STATUS_ZOMBIE
    return False


@dataclass(kw_only=True)
class Scene:
    """Everything that a blow (an inflicted failure) can hit. `disk` is the run's file system, `clock` the file that
    shifts the hub's clock; either is None if the scene has none. `keeping` holds the tasks that restart the nodes.
    """

    run: RunDirectory
    wire: Wire
    hub: Kept
    nodes: list[Kept]
    engine: Engine
    disk: SmallDisk | None = None
    clock: Path | None = None
    memory: MemoryGroup | None = None
    database: PostgreSQL | None = None
    broker: BrokerProcess | None = None
    gateways: list[Kept] = field(default_factory=list)
    keeping: list[asyncio.Task[None]] = field(default_factory=list)
    in_background: set[asyncio.Task[None]] = field(default_factory=set)

    async def reaches(self, step: int, *, within_s: float) -> int | None:
        """Wait until this step is trained. Return the newest trained step; None after `within_s`."""

        def look() -> int | None:
            newest = newest_step(self.engine)
            return newest if newest is not None and newest >= step else None

        return await awaited(look, within_s=within_s)

    async def quiet(self) -> None:
        """End the nodes, and wait until the hub has committed all messages in the broker. Raises RunFailed."""
        for task in self.keeping:
            task.cancel()
        await asyncio.wait(self.keeping)
        if self.broker is not None:
            await asyncio.to_thread(wait_until_taken, self.broker, run_id_of(self.run.database_url))


async def awaited(look: Callable[[], T | None], *, within_s: float) -> T | None:
    """Call `look` on a thread, repeatedly, until it returns something, and return that; None after `within_s`."""
    clock = asyncio.get_running_loop().time
    until = clock() + within_s
    while True:
        found = await asyncio.to_thread(look)
        if found is not None or clock() > until:
            return found
        await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def scene(
    scratch: Path,
    wire: Wire,
    hub_port: int,
    *,
    seed: int,
    disk: SmallDisk | None = None,
    memory: MemoryGroup | None = None,
    database: PostgreSQL | None = None,
    broker: BrokerProcess | None = None,
    fake_clock: bool = False,
) -> AsyncIterator[Scene]:
    """During the block, run a hub at `hub_port`, and nodes that connect to it through `wire`. With a broker, gateways
    behind `wire` hold the nodes' connections.
    """
    run = RunDirectory((disk.directory if disk is not None else scratch) / "run")
    sections: dict[str, dict[str, Any]] = {
        "run": {"seed": seed},
        "server": {"port": hub_port},
        "training": {"steps": STEPS},
    }
    if database is not None:
        sections["store"] = {"url": database.url}
    if broker is not None:
        sections["server"]["trusted_proxies"] = ["127.0.0.1"]
        sections["gateways"] = {"url": broker.url, "port": wire.hub_port}
    make_run(run, load_config(None, merged(SETTINGS, sections)))
    clock = scratch / "clock" if fake_clock else None
    env = {"OMP_NUM_THREADS": "1"}
    if clock is not None:
        clock.write_text("+0\n")
        env |= {
            "LD_PRELOAD": str(faketime()),
            "FAKETIME_TIMESTAMP_FILE": str(clock),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            "FAKETIME_DONT_RESET": "1",
        }
    within = memory.command if memory is not None else ()
    hub = Kept(
        "hub", [*within, sys.executable, "-m", "echo_hub.main", "serve", str(run.root)], env=env,
        log=scratch / "hub.log",
    )  # fmt: skip
    command = [sys.executable, "-m", "echo_hub.main", "gateway", str(run.root)]
    gateways = [
        Kept(name, command, env={"OMP_NUM_THREADS": "1"}, log=scratch / f"{name}.log")
        for name in (f"gateway{number}" for number in range(1, GATEWAYS + 1 if broker is not None else 1))
    ]
    engine = connect(database.url if database is not None else run.database_url)
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(wire.open())
        nodes = [_node(scratch / f"node{number}", url) for number in range(1, NODES + 1)]
        keeping = [asyncio.create_task(kept.run()) for kept in (hub, *gateways, *nodes)]
        made = Scene(
            run=run, wire=wire, hub=hub, nodes=nodes, engine=engine, disk=disk, clock=clock, memory=memory,
            database=database, broker=broker, gateways=gateways, keeping=keeping[-NODES:],
        )  # fmt: skip
        try:
            yield made
        finally:
            for task in (*made.in_background, *keeping[::-1]):
                task.cancel()
            await asyncio.wait([*made.in_background, *keeping])
            engine.dispose()


def faketime() -> Path | None:
    return next((path for path in FAKETIME if path.exists()), None)


def _node(home: Path, url: str) -> Kept:
    options = ["--quiet", "--name", home.name, "--data-dir", str(home), "--threads", "1", "--swarm-host", "127.0.0.1"]
    command = [sys.executable, "-m", "echo_node.main", "join", url, "--backend", "llama_cpp", *options]
    return Kept(home.name, command, env=ALONE, log=home.with_suffix(".log"))
