"""Start, watch and end the learner's processes on one host, using torchrun's agent.

If the learner has several processes, the hub starts `python -m echo_hub.learner.launch SETTINGS` as its child, in place
of the single worker process. The child's standard input and output are those of rank 0. On other hosts, `echo-hub
learner` calls `serve_host`. If one process fails, all are ended, and the hub restarts them from the newest checkpoint.

Ranks trust each other, and anyone who can reach the address can join: use a private network. Without an address, the
ranks meet on the loopback interface. Importing this module loads no torch.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from echo_hub.config.section import Section
from echo_shared.errors import LearnerError
from echo_shared.process.child import describe_end

log = logging.getLogger(__name__)

RETRY_S: Final = 1.0
"""Shortest pause, in seconds, before another host tries again to reach the hub's host. Pauses are random, up to twice
as long."""

_WAIT_FOR_HOSTS_S: Final = 86_400
_LOOPBACK: Final = "127.0.0.1"


class Launch(Section):
    """Place of one host's processes in a learner that may run on several hosts."""

    processes: int
    """Number of learner processes on this host, equal on every host."""
    hosts: int = 1
    host_rank: int = 0
    """The host's number; 0 is the hub's host."""
    address: str = ""
    """HOST:PORT on the hub's host, where the ranks meet; may be empty with a single host."""
    base_dir: Path | None = None
    """Directory of the base model on a host other than the hub's; None on the hub's host."""
    parent_pid: int | None = None
    """Process id of the hub. When the hub ends, this process ends too."""


def run(launch: Launch) -> None:
    """Wait for the other hosts, then run this host's processes until they end.

    Raises LearnerError if a process fails, which ends all the others.
    """
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    host, _, port = launch.address.rpartition(":") if launch.address else (_LOOPBACK, ":", "0")
    if host in (_LOOPBACK, "localhost"):
        _talk_over_loopback()
    store = None
    if launch.host_rank == 0:
        # Pass a socket that is bound to this one address: torchrun's agent itself would listen on all addresses of the
        # host.
        listener = _listen(host, int(port))
        port = str(listener.getsockname()[1])
        store = TCPStore(
            host,
            int(port),
            is_master=True,
            wait_for_workers=False,
            multi_tenant=True,
            master_listen_fd=listener.detach(),
        )
    config = LaunchConfig(
        min_nodes=launch.hosts,
        max_nodes=launch.hosts,
        nproc_per_node=launch.processes,
        run_id="echo-learner",
        rdzv_backend="static",
        rdzv_endpoint=f"{host}:{port}",
        rdzv_configs={"rank": launch.host_rank, "timeout": _WAIT_FOR_HOSTS_S},
        local_addr=host if launch.host_rank == 0 else None,
        max_restarts=0,
    )
    arguments = ["-m", "echo_hub.learner.serve", "--launcher", os.getpid()]
    if launch.base_dir is not None:
        arguments += ["--base", launch.base_dir]
    try:
        elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        raise LearnerError(
            "A learner process failed, so all were ended.", got=f"rank {rank}: {describe_end(failure.exitcode)}"
        ) from error
    except DistError as error:
        raise LearnerError("The learner lost its other hosts.", got=str(error).splitlines()[0]) from error
    finally:
        del store


def serve_host(launch: Launch) -> None:
    """Run this host's part of the learner each time the hub starts its own part, until Ctrl-C or SIGTERM."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    while True:
        # With the default action, a signal ends this process at once, even in a blocking call. While learner processes
        # run, torchrun handles both signals and ends the processes.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        log.info("host %d of %d meets the hub's learner at %s", launch.host_rank, launch.hosts, launch.address)
        try:
            run(launch)
            log.info("the learner has ended; this host waits for it to start again")
        except LearnerError as error:
            log.warning("%s", error)
        except SignalException:
            return
        time.sleep(random.uniform(RETRY_S, 2 * RETRY_S))


def end_with(pid: int) -> None:
    def watch() -> None:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait()
        os._exit(1)

    threading.Thread(target=watch, name=f"watch-{pid}", daemon=True).start()


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port))
    except OSError as error:
        raise LearnerError(
            "The learner cannot listen on its address.",
            got=f"{host}:{port}: {error}",
            do="Set learner.address to an address of the hub's host and a free port.",
        ) from error


def _talk_over_loopback() -> None:
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    if loopback is not None:
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, loopback)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    given = Launch.model_validate_json(sys.argv[1])
    assert given.parent_pid is not None, "the hub is this process's parent"
    end_with(given.parent_pid)
    try:
        run(given)
    except LearnerError as error:
        log.error("%s %s", error.what, error.got)
        sys.exit(1)
