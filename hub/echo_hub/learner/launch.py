"""Starts the learner's processes of one host, watches them, and ends with them: torchrun's own agent.

`python -m echo_hub.learner.launch SETTINGS` is the hub's child in place of the one worker process; its standard streams
are rank 0's. On the other hosts `echo-hub learner` calls `serve_host`. When one process ends badly, all are ended: the
hub starts them again from the newest checkpoint.

Ranks trust each other: whoever reaches the address could join, so it belongs on a network of one's own. Without one,
they meet on the loopback interface. Importing this loads no torch.
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
from echo_shared.child import describe_end
from echo_shared.errors import LearnerError

log = logging.getLogger(__name__)

RETRY_S: Final = 1.0
"""On another host, at least, from the end of its processes to the next try to meet the hub's; at most twice that."""

_WAIT_FOR_HOSTS_S: Final = 86_400
_LOOPBACK: Final = "127.0.0.1"


class Launch(Section):
    """The part of a learner that one host runs."""

    processes: int
    """Processes on this host, as on every other."""
    hosts: int = 1
    host_rank: int = 0
    """The host's number; 0 = the hub's."""
    address: str = ""
    """HOST:PORT at the hub's host; may be empty when there is no other."""
    base_dir: Path | None = None
    """The base model, on a host that is not the hub's."""
    parent_pid: int | None = None
    """The hub, without which its host's part ends."""


def run(launch: Launch) -> None:
    """Runs the processes to their end, after the other hosts' have come.

    Raises LearnerError when one ends badly, which ends all the others.
    """
    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    host, _, port = launch.address.rpartition(":") if launch.address else (_LOOPBACK, ":", "0")
    if host in (_LOOPBACK, "localhost"):
        _talk_over_loopback()
    store = None
    if launch.host_rank == 0:
        # The agent opens no port of its own when its process listens on this one: on this address, and on no other.
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
            "A learner process ended, and the others with it.", got=f"rank {rank}: {describe_end(failure.exitcode)}"
        ) from error
    except DistError as error:
        raise LearnerError("The learner's other hosts are gone.", got=str(error).splitlines()[0]) from error
    finally:
        del store


def serve_host(launch: Launch) -> None:
    """Runs another host's part, as often as the hub starts its own, until Ctrl-C or SIGTERM."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    while True:
        # At once, also in a call that waits; while processes run, torchrun handles both and ends them.
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
    """From now on, this process ends at once when the process `pid` does."""

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
