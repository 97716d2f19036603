"""The hub's Ray driver process: `python -m echo_hub.cluster.driver`. `echo_hub.cluster.link` starts it.

If a driver process has lost its cluster for a minute, Ray ends it. So the hub itself is not the driver. The driver
process owns the actors: when it ends, Ray ends every actor with its children. The hub sends these frames: `start` a
child of a kind in the actor of a slot (a named place for one child), `to` a child, `end` a child. Frames name files by
their paths. The driver reads the files, so the hub's event loop never holds their bytes. Frames to the hub are `about`
a child: its output (`frames`, `log`, `exited`), the reason why it cannot start (`failed`) or waits (`waiting`), or the
loss of its actor (`lost`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import ray
from ray.exceptions import OutOfMemoryError, RayError, RayTaskError

from echo_hub.cluster.actor import POLL_S, ChildHost
from echo_hub.cluster.parcel import source_hash
from echo_shared.process.child import Frame, ParentPipe

log = logging.getLogger(__name__)

NAMESPACE: Final = "echo"
"""Ray's namespace of the actors' names. The names begin with the run's id, so runs can share the namespace."""
ANSWERS_S: Final = 20.0
"""Longest time in seconds that a cluster may take to list its machines. After that it counts as gone."""
PLACED_S: Final = 10.0
"""If an actor waits for a machine for this many seconds, the driver tells the hub."""
ENDING_S: Final = 20.0
"""Seconds that an actor has to end its children. After that, the actor is killed."""
LAST_S: Final = 25.0
"""Longest time in seconds for which this process continues after the hub has ended."""
_NAME_S: Final = 0.5
_NAME_TRIES: Final = 20


class RayDriver:
    """Starts and drives the Ray actors. Create it when the cluster is connected."""

    def __init__(self, pipe: ParentPipe, frame: Frame) -> None:
        self._pipe = pipe
        self._owner: str = frame["owner"]
        self._kinds: Mapping[str, Mapping[str, Any]] = frame["kinds"]
        self._within_s: float = POLL_S + frame["silent_s"]
        """If an actor sends no reply for this many seconds, it counts as lost."""
        self._parcels: dict[str, asyncio.Task[Any]] = {}
        """Parcels (zips of the files that a child needs) that are stored in the cluster, by the path of the zip."""
        self._source = source_hash()
        self._actors: dict[str, Any] = {}
        """Actors that are ready for children, by slot."""
        self._children: dict[int, tuple[str, asyncio.Task[None]]] = {}
        self._sent: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Process the hub's frames until the hub is gone. Then end all actors."""
        try:
            while (frame := await asyncio.to_thread(self._pipe.receive)) is not None:
                if "start" in frame:
                    number = frame["start"]
                    self._children[number] = frame["slot"], asyncio.create_task(self._host(number, frame))
                elif "to" in frame and frame["to"] in self._children:
                    self._in_background(self._send(frame))
                elif "end" in frame and frame["end"] in self._children:
                    slot, task = self._children.pop(frame["end"])
                    task.cancel()
                    if frame.get("with_actor") and slot in self._actors:
                        self._in_background(self._close(slot))
        finally:
            last = threading.Timer(LAST_S, os._exit, (1,))  # Ray may wait forever for a lost cluster.
            last.daemon = True
            last.start()
            for _, task in self._children.values():
                task.cancel()
            await asyncio.gather(*map(self._close, list(self._actors)), return_exceptions=True)

    def _say(self, number: int, **said: Any) -> None:
        with contextlib.suppress(BrokenPipeError):  # `run` notices the closed pipe.
            self._pipe.send({"about": number, **said})

    async def _send(self, frame: Frame) -> None:
        files = {} if not frame["files"] else await asyncio.to_thread(_read, frame["files"])
        slot, _ = self._children.get(frame["to"], ("", None))
        if (actor := self._actors.get(slot)) is not None:
            # Do not wait: the actor's answers show if the frame has arrived.
            actor.send.remote(frame["to"], frame["number"], frame["frame"], files, frame["dropped"])

    async def _host(self, number: int, frame: Frame) -> None:
        """Start a child in the actor of its slot, and forward the child's answers."""
        slot = frame["slot"]
        try:
            if slot not in self._actors:
                actor, problem = await self._prepared(number, slot, self._kinds[frame["kind"]])
                if problem:
                    await asyncio.to_thread(ray.kill, actor)
                    self._say(number, failed=problem)
                    return
                self._actors[slot] = actor
            actor = self._actors[slot]
            async with asyncio.timeout(self._within_s):
                await actor.begin.remote(number, frame["spec"], frame["opening"])
            while True:
                async with asyncio.timeout(self._within_s):
                    answer = await actor.answers.remote(number)
                self._say(number, **answer)
                if answer["exited"] is not None:
                    return
        except asyncio.CancelledError:
            if (actor := self._actors.get(slot)) is not None:
                actor.end.remote(number)
            raise
        except TimeoutError:
            self._lost(number, slot, f"no answer in {self._within_s:g} s")
        except RayTaskError as error:
            self._lost(number, slot, repr(error.cause))
        except RayError as error:
            self._lost(number, slot, _in_one_line(error), is_for_memory=isinstance(error, OutOfMemoryError))
        except Exception as error:
            # Nothing above this task handles errors, and Ray raises many kinds of them while a cluster shuts down.
            log.exception("slot %s failed", slot)
            self._lost(number, slot, repr(error))

    def _lost(self, number: int, slot: str, reason: str, *, is_for_memory: bool = False) -> None:
        actor = self._actors.pop(slot, None)
        self._children.pop(number, None)
        self._say(number, lost=reason, for_memory=is_for_memory)
        self._in_background(_end_without_cluster())
        if actor is not None:
            self._in_background(_kill(actor))

    def _in_background(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._sent.add(task)
        task.add_done_callback(self._sent.discard)

    async def _prepared(self, number: int, slot: str, kind: Mapping[str, Any]) -> tuple[Any, str]:
        """Create an actor for a slot, and wait until Ray has resources for it. Return the actor and the reason why the
        actor is unusable ("" if usable)."""
        options, packed = kind["options"], kind["parcel"]
        if packed not in self._parcels:
            put = asyncio.to_thread(lambda: ray.put(Path(packed).read_bytes()))
            self._parcels[packed] = asyncio.create_task(put)
        parcel = await asyncio.shield(self._parcels[packed])
        actor = await self._made(f"{self._owner}-{slot}", options)
        coming = actor.prepare.remote(parcel, self._source, kind["lies_there"])
        prepared = asyncio.wrap_future(coming.future())
        try:
            if not (await asyncio.wait([prepared], timeout=PLACED_S))[0]:
                there_is = {
                    name: amount
                    for name, amount in (await asyncio.to_thread(ray.cluster_resources)).items()
                    if not name.startswith(("node:", "object_store")) and name != "memory"
                }
                wanted = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options["resources"]}
                self._say(number, waiting=f"each needs {_amounts(wanted)}; the cluster has {_amounts(there_is)}")
            return actor, await prepared
        except BaseException:
            await asyncio.shield(_kill(actor))
            raise

    async def _made(self, name: str, options: Mapping[str, Any]) -> Any:
        """Create an actor with this name. If an earlier driver of the same run left an actor with the same name, end
        that actor first."""
        made = ray.remote(ChildHost).options(
            name=name, max_restarts=0, max_task_retries=0, scheduling_strategy="SPREAD", **options
        )
        for tried in range(_NAME_TRIES):
            try:
                return await asyncio.to_thread(made.remote)
            except ValueError:
                if tried == _NAME_TRIES - 1:
                    raise
                with contextlib.suppress(ValueError):
                    await asyncio.to_thread(lambda: ray.kill(ray.get_actor(name)))
                await asyncio.sleep(_NAME_S)
        raise AssertionError

    async def _close(self, slot: str) -> None:
        actor = self._actors.pop(slot)
        try:
            async with asyncio.timeout(ENDING_S):
                await actor.close.remote()
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds of errors, see above.
            log.warning("the actor of %s does not end when asked: %s", slot, error)
        await _kill(actor)


def _read(files: Mapping[str, str]) -> dict[str, bytes]:
    """Read these files. A file that cannot be read is left out; the process that needs it reports the problem."""
    found = {}
    for name, path in files.items():
        try:
            found[name] = Path(path).read_bytes()
        except OSError as error:
            log.warning("a file is not sent: %s", error)
    return found


async def _end_without_cluster() -> None:
    """End this process if the cluster does not answer. A Ray client never reconnects, so a new process is needed."""
    try:
        async with asyncio.timeout(ANSWERS_S):
            await asyncio.to_thread(ray.nodes)
    except Exception as error:  # noqa: BLE001 - Ray's client raises plain Exception.
        print(f"The Ray cluster does not answer: {error!r}", file=sys.stderr, flush=True)
        os._exit(1)  # Ray's threads may wait forever.


async def _kill(actor: Any) -> None:
    try:
        await asyncio.to_thread(ray.kill, actor)
    except Exception as error:  # noqa: BLE001 - See above. Ray ends this process's actors anyway.
        log.warning("an actor cannot be ended: %s", error)


def _amounts(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(resources.items()) if amount) or "nothing"


def _in_one_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:500]


def main(pipe: ParentPipe) -> int:
    if (frame := pipe.receive()) is None:
        return 0
    try:
        ray.init(address=frame["address"], namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    except (ConnectionError, OSError, RuntimeError, ValueError, TimeoutError, RayError) as error:
        pipe.send({"failed": _in_one_line(error)})
        return 1
    pipe.send({"value": "connected"})
    asyncio.run(RayDriver(pipe, frame).run())
    ray.shutdown()
    return 0


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    parent = ParentPipe()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    sys.exit(main(parent))
