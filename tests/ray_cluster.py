from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, Final

import psutil
import pytest

STORE_BYTES = 80 * 2**20
ENVIRONMENT = {
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_worker_register_timeout_seconds": "120",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Environment variables of Ray: timeouts for a busy machine, and no usage reports."""
WITHIN_S: Final = 120.0
STARTS: Final = 3
"""Maximum number of attempts to start a raylet (Ray's process on each machine). Ray allows the raylet's agents fifteen
seconds, which a busy machine may exceed.
"""
AGENTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
"""Options with the ports of a raylet's agents. All ports are given: a raylet waits up to fifteen seconds for each port
that it must find out.
"""


class RayCluster:
    """A Ray cluster of two raylets. The first one, the head, is never killed; the second one has the custom resource
    `other`.
    """

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._raylets = {str(_raylet(cluster.head_node))}
        self.other = self._add()

    @property
    def address(self) -> str:
        address: str = self._cluster.address
        return address

    def _add(self) -> Any:
        added = self._cluster.add_node(resources={"other": 8}, **_machine())
        self._raylets.add(str(_raylet(added)))
        return added

    def kill_other(self) -> None:
        """Kill the second raylet by SIGKILL, and start another one."""
        self._cluster.remove_node(self.other, allow_graceful=False)
        self.other = self._add()

    def settle(self) -> None:
        """Wait until the head has noticed all lost raylets. Before that it may try to start actors on them."""
        self._cluster.wait_for_nodes(WITHIN_S)

    def actors(self) -> list[psutil.Process]:
        """Return the processes of all of Echo's actors in this cluster."""
        actors = [process for process in psutil.process_iter() if _title(process).startswith("ray::ChildHost")]
        return [actor for actor in actors if _of_raylet(actor) in self._raylets]


def _raylet(node: Any) -> int:
    (raylet,) = node.all_processes["raylet"]
    return int(raylet.process.pid)


def _of_raylet(actor: psutil.Process) -> str:
    with suppress(psutil.Error):
        return actor.environ().get("RAY_RAYLET_PID", "")
    return ""


def _machine() -> dict[str, int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("", 0))) for _ in AGENTS]
        ports = [one.getsockname()[1] for one in sockets]
    return {"num_cpus": 8, "object_store_memory": STORE_BYTES, **dict(zip(AGENTS, ports, strict=True))}


def _title(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return "".join(process.cmdline()[:1])
    return ""


@contextmanager
def ray_cluster() -> Iterator[RayCluster]:
    cluster_utils = pytest.importorskip("ray.cluster_utils", reason="the extra `ray` is not installed")
    before = {name: os.environ.get(name) for name in ENVIRONMENT}
    os.environ |= ENVIRONMENT
    cluster = None
    try:
        for left in reversed(range(STARTS)):
            cluster = cluster_utils.Cluster()
            try:
                cluster.add_node(include_dashboard=False, **_machine())
                found = RayCluster(cluster)
                break
            except Exception:  # Ray's processes fail in many ways; any failure means another attempt.
                cluster.shutdown()
                if not left:
                    raise
        yield found
    finally:
        if cluster is not None:
            cluster.shutdown()
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


async def until(is_so: Callable[[], object]) -> None:
    async with asyncio.timeout(WITHIN_S):
        while not is_so():
            await asyncio.to_thread(psutil.cpu_percent, 0.05)


def kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGKILL)
