"""A process with verifiers' own env server, and the connection to it.

The process runs this file as a program, in the interpreter that has verifiers:

    python verifiers_worker.py            serve: the first line of stdin is {"address", "config"}
    python verifiers_worker.py uv ...     stand in for the program `uv` (see `answer_for_uv`)

The server ends when its stdin ends, so it never outlives the process that started it.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import logging
import os
import re
import sys
import tomllib
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, Protocol

log = logging.getLogger(__name__)

STOP_S: Final = 2.0
"""Seconds from SIGTERM to SIGKILL for a program of an episode."""
EXIT_S: Final = 10.0
"""Seconds between the end of a worker's stdin and SIGKILL."""
PORT_FILE: Final = "MCP_PORT_FILE"
PORT_FILES: Final = "/tmp/vf-port-"
"""Beginning of the names of verifiers' port files."""


class RunListener(Protocol):
    """Object that gets each change of a run's trace."""

    def changed(self, delta: dict[str, Any]) -> None:
        """Handle one change of a trace, in the form that verifiers gives it."""


class WorkerGone(Exception):
    """The worker's process has ended. The text says how."""


class RunFailed(Exception):
    """The server has answered a request with an error."""


class EnvWorker:
    """One env server (verifiers' process that runs agents). Create it with `start`."""

    def __init__(self, name: str, process: asyncio.subprocess.Process, socket: Any) -> None:
        self.name = name
        self._process = process
        self._socket = socket
        self._waiting: dict[str, asyncio.Future[bytes]] = {}
        self._listeners: dict[str, tuple[Any, RunListener]] = {}
        """For each run's id: the record of the run, which grows with each message of the server, and the run's
        listener."""
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]
        self.load = 0
        """Number of runs in progress. The owner of this worker keeps the count."""
        self.gone = ""
        """How the process has ended; "" while it runs."""

    @classmethod
    async def start(cls, name: str, config: Mapping[str, Any], folder: Path) -> EnvWorker:
        """Start a worker for the environment of `config`, which is verifiers' own section [env].

        `folder` is the working directory; its subfolder `name` is the home directory of the worker's programs. Raises
        WorkerGone if the server ends before it answers.
        """
        import zmq
        import zmq.asyncio

        # A path relative to the working directory: the names of sockets are limited to about 100 bytes.
        address = f"ipc://{name}.sock"
        (folder / f"{name}.sock").unlink(missing_ok=True)
        process = await asyncio.create_subprocess_exec(
            sys.executable, __file__, cwd=folder, env=_environment(folder, name), stdin=asyncio.subprocess.PIPE
        )
        assert process.stdin is not None
        process.stdin.write(json.dumps({"address": address, "config": config}).encode() + b"\n")
        await process.stdin.drain()
        socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        for option, value in ((zmq.LINGER, 0), (zmq.SNDHWM, 0), (zmq.RCVHWM, 0)):
            socket.setsockopt(option, value)
        socket.connect(address)
        worker = cls(name, process, socket)
        try:
            await worker._request(uuid.uuid4().hex, "health", {})
        except BaseException:
            await worker.close()
            raise
        return worker

    @property
    def pid(self) -> int:
        return self._process.pid

    async def run(self, run_id: str, request: Mapping[str, Any], listener: RunListener) -> Any:
        """Run one episode, and return verifiers' record of it.

        Raises RunFailed, also after `cancel`, and WorkerGone.
        """
        from verifiers.v1.episode import WireEpisode
        from verifiers.v1.serve import EpisodeAssembly, RunResponse
        from verifiers.v1.serve.delta import unpack

        assembly = EpisodeAssembly()
        self._listeners[run_id] = assembly, listener
        try:
            reply = RunResponse.model_validate(unpack(await self._request(run_id, "run", request)))
        finally:
            self._listeners.pop(run_id, None)
        if not reply.success or reply.head is None:
            raise RunFailed(reply.error or "The env server gave no record of the episode.")
        record = assembly.finish(reply.head, reply.traces)
        return await asyncio.to_thread(WireEpisode.model_validate, record)

    async def cancel(self, run_id: str) -> None:
        """Tell the server to end a run. `run` returns once its programs have ended."""
        if not self.gone:
            await self._send(uuid.uuid4().hex, "cancel", {"request_id": run_id})

    async def close(self) -> None:
        """Close the worker's stdin, and kill the process after `EXIT_S`."""
        for task in self._tasks[:1]:
            task.cancel()
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._process.wait(), EXIT_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    async def _request(self, request_id: str, method: str, payload: Mapping[str, Any]) -> bytes:
        if self.gone:
            raise WorkerGone(self.gone)
        future: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting[request_id] = future
        await self._send(request_id, method, payload)
        try:
            return await future
        finally:
            self._waiting.pop(request_id, None)

    async def _send(self, request_id: str, method: str, payload: Mapping[str, Any]) -> None:
        import msgpack

        packed = msgpack.packb(dict(payload), use_bin_type=True)
        await self._socket.send_multipart([request_id.encode(), method.encode(), packed])

    async def _receive(self) -> None:
        from verifiers.v1.serve.delta import unpack

        while True:
            frames = await self._socket.recv_multipart()
            if len(frames) != 3:
                log.warning("the env server sent %d frames, not 3", len(frames))
                continue
            request_id, kind, data = frames[0].decode(), frames[1], frames[2]
            if kind == b"delta":
                if request_id in self._listeners:
                    assembly, listener = self._listeners[request_id]
                    delta = unpack(data)
                    assembly.apply(delta)
                    listener.changed(delta)
            elif (future := self._waiting.get(request_id)) is not None and not future.done():
                future.set_result(data)

    async def _watch(self) -> None:
        status = await self._process.wait()
        self.gone = f"The worker's process has ended with status {status}."
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(WorkerGone(self.gone))


def _environment(folder: Path, name: str) -> dict[str, str]:
    """Return the environment variables of a worker: its files are in `folder / name`, and `uv` is this file."""
    programs = folder / name / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    stand_in = programs / "uv"
    stand_in.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__).resolve()}" uv "$@"\n')
    stand_in.chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    offline = os.environ.get("HF_HUB_OFFLINE", "1")
    return {**os.environ, "HOME": str(folder / name), "PATH": path, "HF_HUB_OFFLINE": offline}


class _Parent:
    """Stand-in for verifiers' signal that the parent process has ended: `recv` returns when stdin ends."""

    def recv(self) -> None:
        sys.stdin.read()


def _log_to_stderr() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")


def serve() -> None:
    """Serve the environment until stdin ends."""
    from verifiers.v1.runtimes import subprocess as programs
    from verifiers.v1.serve import serve_env

    job = json.loads(sys.stdin.readline())
    _keep_port_files_at_home(programs.SubprocessRuntime)
    # Closing a session must end within sessions.close_timeout_s. verifiers itself waits for 5 s.
    if hasattr(programs, "_BACKGROUND_STOP_TIMEOUT"):
        programs._BACKGROUND_STOP_TIMEOUT = STOP_S
    serve_env(
        max_workers=1,
        address=job["address"],
        config_data=job["config"],
        death_pipe=_Parent(),
        log_setup=_log_to_stderr,
    )


def _keep_port_files_at_home(runtime: Any) -> None:
    """Let tool servers write their port files, which verifiers places in /tmp, to their working directories: a session
    may write nowhere else."""
    start, read = runtime.run_background, runtime._read

    async def run_background(self: Any, argv: list[str], env: dict[str, str], log: str) -> None:
        file = env.get(PORT_FILE, "")
        moved = {PORT_FILE: str(self.workdir / Path(file).name)} if file.startswith(PORT_FILES) else {}
        await start(self, argv, {**env, **moved}, log)

    async def read_here(self: Any, path: str, max_bytes: int | None = None) -> bytes:
        here = Path(path).name if path.startswith(PORT_FILES) else path
        content: bytes = await read(self, here, max_bytes)
        return content

    runtime.run_background, runtime._read = run_background, read_here


def answer_for_uv(arguments: list[str]) -> int:
    """Answer as the program uv would, for an agent program whose packages this interpreter has.

    verifiers prepares each agent program with `uv sync --script FILE` and `uv python find --script FILE`. Its own agent
    programs need packages that verifiers itself needs, so this interpreter can run them: no package index is asked, and
    no second environment is made. Other programs are left to the real uv.
    """
    if "--help" in arguments:
        print("--script")
        return 0
    file = next((arguments[at + 1] for at, one in enumerate(arguments[:-1]) if one == "--script"), "")
    lacking = missing_packages(Path(file).read_text()) if file else ["a script"]
    if not lacking and arguments[:1] == ["sync"]:
        return 0
    if not lacking and arguments[:2] == ["python", "find"]:
        print(sys.executable)
        return 0
    real = _real_uv()
    if real is not None:
        os.execv(real, [real, *arguments])
    print(
        f"The agent program needs {', '.join(lacking)}, which {sys.executable} lacks. Install it there, or install uv.",
        file=sys.stderr,
    )
    return 1


def _real_uv() -> str | None:
    """Return the path of uv itself, not of its stand-in."""
    folders = (Path(one) for one in os.environ.get("PATH", "").split(os.pathsep) if one)
    found = (folder / "uv" for folder in folders if os.access(folder / "uv", os.X_OK))
    return next((str(one) for one in found if Path(__file__).name.encode() not in one.read_bytes()[:4096]), None)


def missing_packages(script: str) -> list[str]:
    """Return the packages that a script's own header (PEP 723) asks for and that this interpreter lacks."""
    found = re.search(r"(?m)^# /// script\s*$\s(?P<header>(^#(| .*)$\s)+)^# ///$", script)
    if found is None:
        return []
    lines = (line[2:] if line.startswith("# ") else line[1:] for line in found["header"].splitlines())
    wanted = tomllib.loads("\n".join(lines)).get("dependencies", [])
    return [one for one in wanted if not _has_package(one)]


def _has_package(wanted: str) -> bool:
    from packaging.requirements import Requirement

    requirement = Requirement(wanted)
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return requirement.specifier.contains(version, prereleases=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["uv"]:
        sys.exit(answer_for_uv(sys.argv[2:]))
    serve()
    # A normal exit of the interpreter takes 10 s and more: libraries wait for their threads.
    os._exit(0)
