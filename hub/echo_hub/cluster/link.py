"""The hub's end of a Ray cluster. Child processes run in the cluster, and the hub uses them like local ones.

    async with RayLink.open(config.ray, {"scorer": parcel}, owner="run-1", logs=logs) as link:
        child = await link.spawn("scorer", "scorer-0", command, answer_s=15.0, counted="arguments", ending_s=5.0)
        await child.open({...})
        await child.send({"arguments": [...]})
        await child.receive()            raises ChildExited if it has ended, as a local child does
        await child.stop()

All these calls except `stop` may raise ChildLost if the child's machine, actor or cluster is gone or unusable.

A separate process talks to Ray (`echo_hub.cluster.driver`). If this process loses the cluster, it ends and all children
are lost. The hub then starts new drivers until one connects. In the meantime, `absence` gives the reason. Late messages
of replaced children are ignored.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import itertools
import logging
import random
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from echo_hub.cluster.parcel import Parcel
from echo_hub.config.scoring_sections import RayConfig, WorkerKind
from echo_shared.errors import ConfigError, EchoError
from echo_shared.installation import how_to_install
from echo_shared.logs.log_file import append_printed
from echo_shared.process.backoff import backoff_s
from echo_shared.process.child import HEADER_BYTES, ChildExited, Death, Frame, pack_frame, unpack_frame
from echo_shared.process.supervised import ChildLimits, Command, SupervisedChild

log = logging.getLogger(__name__)

CONNECTED_S: Final = 120.0
"""Longest time in seconds until the driver has connected or reports a failure."""
SILENT_S: Final = 20.0
"""If the reply of an actor is overdue by this many seconds, the actor counts as lost."""
KNOCK_S: Final = 10.0
FIRST_S: Final = 1.0
LIMIT_S: Final = 30.0
_ENVIRONMENT: Final = {"RAY_ENABLE_AUTO_CONNECT": "0", "RAY_USAGE_STATS_ENABLED": "0"}
"""Settings that keep a Ray client that has lost its cluster from starting a local one, and Ray from sending usage
statistics."""
_NO_FILES: Final[Mapping[str, Path]] = {}
_DRIVER: Final = ChildLimits(ready_s=CONNECTED_S, silent_s=float("inf"), silent_start_s=float("inf"), ending_s=30.0)


class ChildLost(EchoError):
    """The machine, actor or cluster of a child is gone. The child's work is not the cause."""

    default_code = "child_lost"


class ClusterUnusable(ChildLost):
    """The cluster cannot be reached, or one of its machines cannot run this child. Until that is corrected, new
    children fail."""

    default_code = "cluster_unusable"


class RayLink:
    """The hub's connection to the Ray cluster. Create it with `open`."""

    def __init__(self, config: RayConfig, opening: Mapping[str, Any], *, logs: Path) -> None:
        self._config = config
        self._opening = opening
        self._logs = logs
        self._driver: SupervisedChild | None = None
        self._connected = asyncio.Event()
        self._numbers = itertools.count(1)
        self._children: dict[int, RayChild] = {}
        self._reason = ""
        """Why the cluster cannot be reached; "" while the hub is connected."""
        self._unfit: dict[WorkerKind, str] = {}
        """Reason why the last child's machine could not run the child, by kind of child."""

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, config: RayConfig, parcels: Mapping[WorkerKind, Parcel], *, owner: str, logs: Path
    ) -> AsyncIterator[RayLink]:
        """Connect to the cluster, for children of the kinds in `parcels`. If two links are open at the same time, they
        need different `owner` names.

        Raises ConfigError if Ray is not installed or the cluster cannot be reached. At the end of the block, all
        children and actors are ended.
        """
        if importlib.util.find_spec("ray") is None:
            raise ConfigError(
                "Ray is not installed.",
                got=f"settings that have a {' and a '.join(parcels)} run in a Ray cluster",
                do=f"Install it: {how_to_install('ray')}",
            )
        # Overwrite files that a killed hub left here. Kinds with equal parcels share a file.
        packed = {
            kind: logs / f"ray-{next(first for first in parcels if parcels[first] == parcel)}.zip"
            for kind, parcel in parcels.items()
        }
        await asyncio.to_thread(logs.mkdir, parents=True, exist_ok=True)
        try:
            for path, parcel in {packed[kind]: parcel for kind, parcel in parcels.items()}.items():
                await asyncio.to_thread(parcel.write, path)
            kinds = {
                kind: {
                    "options": config.options(kind),
                    "parcel": str(packed[kind]),
                    "lies_there": dict(parcel.lies_there),
                }
                for kind, parcel in parcels.items()
            }
            opening = {"address": config.address, "owner": owner, "kinds": kinds}
            link = cls(config, {**opening, "silent_s": SILENT_S}, logs=logs)
            await link._connect()
            work = asyncio.create_task(link._run())
            try:
                yield link
            finally:
                work.cancel()
                await asyncio.wait([work])
                await link._disconnect()
        finally:
            for path in packed.values():
                path.unlink(missing_ok=True)

    def absence(self, kind: WorkerKind) -> str:
        """Return why no child of this kind works; "" if a child works or is starting."""
        if self._reason:
            return self._reason
        children = [child for child in self._children.values() if child.kind == kind]
        if any(child.is_ready for child in children):
            return ""
        waiting = (f"Ray lacks resources: {child.waits}" for child in children if child.waits)
        return next(waiting, self._unfit.get(kind, ""))

    async def spawn(
        self, kind: WorkerKind, slot: str, command: Command, *, answer_s: float, counted: str, ending_s: float
    ) -> RayChild:
        """Wait for the cluster, and create a child for the actor of a slot. If the slot has no actor, one is created. A
        slot holds one child at a time.

        `command` runs on the child's machine, and its log is on the hub's. `answer_s` is the timeout for each answer.
        `counted` is a key of the frames: the child owes one answer for each entry of the key's value.
        """
        await self._connected.wait()
        spec = {
            "module": command.module,
            "arguments": list(command.arguments),
            "name": command.name,
            "env": dict(command.env),
            "ends_its_own": command.ends_its_own,
            "answer_s": answer_s,
            "counted": counted,
            "ending_s": ending_s,
        }
        number = next(self._numbers)
        child = self._children[number] = RayChild(self, number, kind, slot, spec, command)
        return child

    async def _say(self, frame: Mapping[str, Any]) -> None:
        """Send a frame to the driver. Raises ClusterUnusable if the driver is gone."""
        if self._driver is None or not self._connected.is_set():
            raise ClusterUnusable("The Ray cluster is unavailable.", got=self._reason or None)
        try:
            await self._driver.send(frame)
        except ChildExited as error:
            raise ClusterUnusable("The Ray driver process has ended.", got=error.got) from error

    def _forget(self, number: int) -> None:
        self._children.pop(number, None)

    async def _connect(self) -> None:
        """Start a driver process, and let it connect. Raises ConfigError."""
        await self._knock()
        command = Command(module="echo_hub.cluster.driver", name="Ray", log=self._logs / "ray.log", env=_ENVIRONMENT)
        try:
            self._driver = await SupervisedChild.start(command, self._opening, _DRIVER)
        except ChildExited as error:
            raise self._unreachable(error.brief) from error
        if "failed" in self._driver.ready:
            said = self._driver.ready["failed"]
            await self._disconnect()
            raise self._unreachable(said)
        self._reason = ""
        self._connected.set()

    async def _knock(self) -> None:
        """Check that the cluster's address accepts connections, because Ray itself would try for minutes. Raises
        ConfigError."""
        if self._config.address == "auto":
            return
        host, _, port = self._config.address.removeprefix("ray://").rpartition(":")
        try:
            async with asyncio.timeout(KNOCK_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except TimeoutError as error:
            raise self._unreachable(f"no connection in {KNOCK_S:g} s") from error
        except OSError as error:
            raise self._unreachable(str(error)) from error
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    def _unreachable(self, said: str) -> ConfigError:
        return ConfigError(
            "No Ray cluster can be reached.",
            got=f'ray.address = "{self._config.address}": {said}',
            do="Start one (ray start --head), make this machine part of one (ray start --address=HOST:6379), or set "
            "ray.address to ray://HOST:10001 of one elsewhere. Without a cluster: "
            'scoring.engine = "local", trust.verifier = "process", evaluation.by = "hub".',
        )

    async def _disconnect(self) -> None:
        driver, self._driver = self._driver, None
        self._connected.clear()
        if driver is not None:
            await driver.stop(timeout_s=_DRIVER.ending_s)

    async def _run(self) -> None:
        """Forward the driver's frames to the children. If a driver has ended, start a new one."""
        failures = 0
        while True:
            try:
                if self._driver is None:
                    await self._connect()
                    log.info("the Ray cluster is available again")
                failures = 0
                await self._read()
            except (ConfigError, ChildExited) as error:
                if not self._reason:
                    log.warning("the Ray cluster is unavailable; reconnecting: %s", error)
                self._reason = error.got if isinstance(error, ConfigError) and error.got else error.brief
            except Exception as error:
                # Nothing above this task handles errors; if the task ended, children would wait forever.
                log.exception("the link to Ray failed")
                self._reason = repr(error)
            await self._disconnect()
            for child in list(self._children.values()):
                child.over(ClusterUnusable("The Ray cluster is unavailable.", got=self._reason))
            await asyncio.sleep(backoff_s(failures, random.random(), first_s=FIRST_S, limit_s=LIMIT_S))
            failures += 1

    async def _read(self) -> None:
        assert self._driver is not None
        while True:
            frame = await self._driver.receive()
            child = self._children.get(frame["about"])
            if child is None:
                continue  # The child has been stopped in the meantime.
            if "waiting" in frame:
                if not any(other.waits for other in self._children.values() if other.kind == child.kind):
                    log.warning("Ray lacks resources for %s so far: %s", child.slot, frame["waiting"])
                child.waits = frame["waiting"]
                continue
            child.waits = ""
            if frame.get("log"):
                await asyncio.to_thread(_append, child.command.log, frame["log"])
            child.told(frame)


def _append(path: Path, printed: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    append_printed(path, printed)


class RayChild:
    """A child in the cluster. It has the methods of `SupervisedChild`."""

    def __init__(
        self, link: RayLink, number: int, kind: WorkerKind, slot: str, spec: Mapping[str, Any], command: Command
    ) -> None:
        self.kind = kind
        self.slot = slot
        self.command = command
        self.ready: Frame = {}
        self.is_ready = False
        self.waits = ""
        """Why Ray has found no machine for the child yet; "" if the child does not wait."""
        self._link = link
        self._number = number
        self._spec = spec
        self._num_sent = 0
        self._found: asyncio.Queue[Frame | EchoError] = asyncio.Queue()
        self._end: EchoError | None = None

    async def open(self, opening: Mapping[str, object]) -> None:
        """Start the child. Raises ChildExited or ChildLost. The answer `failed` means that the machine cannot run the
        child, so the child counts as lost."""
        start = {"start": self._number, "kind": self.kind, "slot": self.slot, "spec": self._spec}
        await self._link._say({**start, "opening": pack_frame(opening)})
        self.ready = await self.receive()
        if "failed" in self.ready:
            self._cannot(self.ready["failed"])
            await self._link._say({"end": self._number, "with_actor": True})
            await self.receive()
        self.is_ready = True
        self._link._unfit.pop(self.kind, None)

    def _cannot(self, why: str) -> None:
        self._link._unfit[self.kind] = why
        self.over(ClusterUnusable("A machine of the Ray cluster cannot run this.", got=why))

    async def send(
        self, frame: Mapping[str, object], *, files: Mapping[str, Path] = _NO_FILES, dropped: Sequence[str] = ()
    ) -> None:
        """Send a frame. Raises ChildExited or ChildLost if the child is known to be gone.

        First, the `files` of this machine are copied to ../sent/NAME on the child's machine, except files that cannot
        be read, and the `dropped` directories there are deleted. Then the child gets the frame.
        """
        if self._end is not None:
            raise self._end
        number, self._num_sent = self._num_sent, self._num_sent + 1
        told = {"to": self._number, "number": number, "frame": pack_frame(frame), "dropped": list(dropped)}
        await self._link._say({**told, "files": {name: str(path) for name, path in files.items()}})

    async def receive(self, *, within_s: float = float("inf")) -> Frame:
        """Return the child's next answer. If the child has ended, raise ChildExited or ChildLost. `within_s` is not
        used: the timeout is the `answer_s` of `RayLink.spawn`, which the child's machine applies."""
        if self._end is not None and self._found.empty():
            raise self._end
        found = await self._found.get()
        if isinstance(found, EchoError):
            raise found
        return found

    def told(self, frame: Frame) -> None:
        for packed in frame.get("frames", ()):
            self._found.put_nowait(unpack_frame(packed[HEADER_BYTES:]))
        if "failed" in frame:
            self._cannot(frame["failed"])
        elif frame.get("for_memory"):
            self.over(self._exited({"death": Death.OUT_OF_MEMORY, "got": frame["lost"]}))
        elif "lost" in frame:
            self.over(ChildLost("A Ray actor is gone.", got=frame["lost"]))
        elif (exited := frame.get("exited")) is not None:
            failed = exited.get("failed")
            self.over(ChildLost("A Ray actor has failed.", got=failed) if failed else self._exited(exited))

    def _exited(self, told: Mapping[str, Any]) -> ChildExited:
        error = ChildExited(
            self.command.name,
            returncode=told.get("returncode", -signal.SIGKILL),
            last_words=told.get("last_words", ""),
            log=self.command.log,
            death=Death(told["death"]),
        )
        error.what, error.got = told.get("what", error.what), told["got"]
        return error

    def over(self, error: EchoError) -> None:
        """Record the error with which the child ended, and wake up callers of `receive`."""
        if self._end is None:
            self._end = error
            self._found.put_nowait(error)
            self.is_ready = False
            self._link._forget(self._number)

    def kill(self) -> None:
        """Do nothing. In the cluster, `stop` also kills the child."""

    async def stop(self, *, timeout_s: float = 10.0) -> None:
        """End the child and forget it. Do nothing if the child is already gone."""
        self.over(ChildLost("It was stopped."))
        with contextlib.suppress(ChildLost):
            await self._link._say({"end": self._number})
