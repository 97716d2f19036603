"""Start hubs and nodes of this checkout as processes, from a coroutine: for tests, and for benchmarks of tenants.

`benchmarks.harness.site` does the same without an event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Final

import psutil
from typer.testing import CliRunner

from benchmarks.harness.site import RunFailed, read_rows
from echo_hub.config.toml_text import as_toml
from echo_hub.main import app

DEADLINE_S: Final = 240.0
CHILD_WITHIN_S: Final = 600.0
LOOK_S: Final = 0.05
FOR_NODES: Final = {
    "ECHO_NODE_BENCH_SECONDS": "0",
    "ECHO_NODE_MANNERS__PRIORITY": "normal",
    "ECHO_NODE_ROUTER_PORTS": "false",
}
"""Environment variables of nodes: no measurement of their speed at the start, and normal priority. Nodes share this
machine with their hub and with other processes, so at the lowest priority they would starve.
"""
OPERATORS: Final[dict[str, dict[str, str]]] = {}
"""HTTP headers of a logged-in operator for each hub that this process has started, by the hub's address."""


def logged_in(url: str, run: Path) -> dict[str, str]:
    """Read the operator's token from a run's directory. Return the HTTP headers with which the operator of this hub is
    logged in.
    """
    OPERATORS[url] = {"Authorization": f"Bearer {(run / 'operator.token').read_text().strip()}"}
    return OPERATORS[url]


class Running:
    """A process that the site has started, with all that it has printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._printed = ""
        self._news = asyncio.Condition()
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        while chunk := await self.process.stdout.read(65_536):
            async with self._news:
                self._printed += chunk.decode(errors="replace")
                self._news.notify_all()
        async with self._news:
            self._news.notify_all()

    async def printed(self, pattern: str, *, within_s: float = DEADLINE_S) -> re.Match[str]:
        """Wait until the process has printed `pattern`. Raises RunFailed if it ends first."""
        async with asyncio.timeout(within_s), self._news:
            while (found := re.search(pattern, self._printed)) is None:
                if self._reader.done():
                    raise RunFailed(self._printed)
                await self._news.wait()
        return found

    async def ended(self, *, within_s: float = DEADLINE_S) -> tuple[int, str]:
        """Wait for the process to end; return its exit status and its whole output."""
        async with asyncio.timeout(within_s):
            await self._reader
            return await self.process.wait(), self._printed

    async def show(self, name: str) -> None:
        print(f"--- {name}\n{self._printed}")

    async def kill(self) -> None:
        """Kill the process by SIGKILL. Its children run on until they notice its end."""
        self.process.kill()
        await self.process.wait()

    async def kill_all(self) -> None:
        """Kill the process, then all processes that it started."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        await self.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=60)

    async def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        """Send the process a signal and wait for its end."""
        if self.process.returncode is None:
            # asyncio's own `send_signal` may reap a process that has just ended, so that its exit status is lost.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)
        return await self.ended()


class LiveSite:
    """Hubs and nodes whose files are all below one directory. They end with the block of `live_site`."""

    def __init__(self, root: Path, stack: AsyncExitStack) -> None:
        self.root = root
        self._stack = stack

    async def start(self, module: str, *arguments: str | Path) -> Running:
        """Start `python -m module` with the environment variables of this process."""
        return await self.program(sys.executable, "-u", "-m", module, *arguments)

    async def program(
        self, *command: str | Path, env: Mapping[str, str] = os.environ, cwd: Path | None = None
    ) -> Running:
        process = await asyncio.create_subprocess_exec(
            *map(str, command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**FOR_NODES, **env, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
            cwd=cwd,
        )
        self._stack.push_async_callback(_end_for_sure, process)
        running = Running(process)
        self._stack.push_async_callback(running.show, " ".join(map(str, command)))
        return running

    async def command(self, module: str, *arguments: str | Path) -> tuple[int, str]:
        return await (await self.start(module, *arguments)).ended()

    async def make_run(self, name: str = "run", *flags: str, **settings: dict[str, object]) -> Path:
        """Run `echo-hub init` with values so small that the run trains in seconds; `settings` override them, by
        section.
        """
        run = self.root / name
        # This process runs the command itself, because a new process would take a second to start.
        made = CliRunner().invoke(app, ["init", str(run), "--port", "0", *flags])
        if made.exit_code != 0:
            raise RunFailed(f"init failed: {made.output} {made.exception!r}")
        small: dict[str, dict[str, object]] = {
            "training": {"steps": 4, "groups_per_step": 8, "group_size": 4, "lora_rank": 4},
            "learner": {"threads": 1},
            "evaluation": {"problems": 16},
            # Without shared memory, nodes on this machine fetch versions over the network, like nodes on other hosts.
            "server": {"heartbeat_s": 1.0, "shared_memory": False},
            # Few tests need the verifier (the process that re-computes rollouts), which costs as much as a second
            # learner.
            "trust": {"verifier": "off"},
        }
        self.change(run, {name: {**small.get(name, {}), **settings.get(name, {})} for name in small | settings})
        return run

    def change(self, run: Path, settings: Mapping[str, Mapping[str, object]]) -> None:
        text = (run / "config.toml").read_text()
        for section, values in settings.items():
            for key, value in values.items():
                text = _set(text, section, key, value)
        (run / "config.toml").write_text(text)

    async def hub(self, run: Path, *flags: str) -> tuple[Running, str]:
        """Start `echo-hub serve`, wait until it is ready, and return the process and its address."""
        hub = await self.start("echo_hub.main", "serve", run, *flags)
        url = (await hub.printed(r"Dashboard +(https?://\S+)/"))[1]
        logged_in(url, run)
        return hub, url

    async def node(
        self,
        url: str,
        name: str,
        *flags: str,
        backend: str = "llama_cpp",
        env: Mapping[str, str] = os.environ,
        module: str = "echo_node.main",
    ) -> Running:
        """Start `echo-node join`; a second start with the same name uses the same data directory.

        llama.cpp is the default engine because it loads faster than PyTorch. Tests that expect a node's tokens to equal
        the hub's own samples need PyTorch.
        """
        home = self.root / name
        where = ("--data-dir", home, "--name", name, "--threads", "1", "--swarm-host", "127.0.0.1")
        command = (sys.executable, "-u", "-m", module, "join", url, *where, "--backend", backend)
        return await self.program(*command, *flags, env=env)


class ServedRun:
    """A run's hub, and its nodes by name. Each can be killed and started again."""

    run: Path
    hub: Running
    url: str

    def __init__(self, site: LiveSite) -> None:
        self.site = site
        self.nodes: dict[str, Running] = {}

    async def serve(self) -> None:
        """Start the hub, or start it again on the same port."""
        self.hub, self.url = await self.site.hub(self.run)
        self.site.change(self.run, {"server": {"port": int(self.url.rpartition(":")[2])}})

    async def node(self, name: str) -> None:
        """Start the node of this name, or start it again. It samples with PyTorch, so its tokens equal those that the
        hub itself would sample.
        """
        self.nodes[name] = await self.site.node(self.url, name, backend="torch")
        # A node that cannot reach its hub when it starts ends at once. So tests may kill the hub only after this line.
        await self.nodes[name].printed("Connected to")

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query on the hub's database."""
        return read_rows(self.run, query, *values)

    def hub_process(self) -> psutil.Process:
        return psutil.Process(self.hub.process.pid)

    async def kill_hub(self) -> None:
        """Kill the hub, wait for the end of its children, and start it again."""
        children = self.hub_process().children(recursive=True)
        await self.hub.kill()
        if psutil.wait_procs(children, timeout=60)[1]:
            raise RunFailed("a child process outlived the hub by a minute")
        await self.serve()

    async def kill_node(self, name: str) -> None:
        """Kill a node with its engine, and start it again."""
        await self.nodes[name].kill_all()
        await self.node(name)

    async def kill_child(self, is_wanted: Callable[[psutil.Process], bool]) -> None:
        """Kill a descendant process of the hub for which `is_wanted` is true. If the hub is still starting this
        process, wait for it. Raises RunFailed.
        """
        give_up_at = time.monotonic() + CHILD_WITHIN_S
        while time.monotonic() < give_up_at:
            for child in self.hub_process().children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if is_wanted(child):
                        child.kill()
                        return
            await asyncio.sleep(LOOK_S)
        raise RunFailed("the hub has no such process")


def _set(text: str, section: str, key: str, value: object) -> str:
    head, mark, rest = text.partition(f"\n[{section}]\n")
    assert mark, f"no section {section}"
    replaced, count = re.subn(rf"(?m)^{key} = .*$", lambda _: f"{key} = {as_toml(value)}", rest, count=1)
    assert count, f"no setting {section}.{key}"
    return head + mark + replaced


async def _end_for_sure(process: asyncio.subprocess.Process) -> None:
    """Kill a process and all its children, and wait for their end. Raises RunFailed if they do not end."""
    if process.returncode is not None:
        return
    with contextlib.suppress(psutil.NoSuchProcess):  # The process has ended, but asyncio has not reported it yet.
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        if psutil.wait_procs(children, timeout=60)[1]:
            raise RunFailed("the processes do not end")
    await process.wait()


@asynccontextmanager
async def live_site(root: Path) -> AsyncIterator[LiveSite]:
    """Yield a site below `root`. All its processes end with the block, even if the block fails."""
    async with AsyncExitStack() as stack:
        yield LiveSite(root, stack)
