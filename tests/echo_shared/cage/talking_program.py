"""A program of an environment that uses sockets, with a port and a Unix socket of another program as targets. It prints
a JSON object: for each use its result or its error.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable
from pathlib import Path

PORT, FOREIGN = int(sys.argv[1]), sys.argv[2]
USES: dict[str, Callable[[], object]] = {}


def use(function: Callable[[], object]) -> Callable[[], object]:
    USES[function.__name__] = function
    return function


@use
def its_own_port() -> object:
    with socket.create_server(("0.0.0.0", 0)) as server:
        host, port = server.getsockname()
        with socket.create_connection(("127.0.0.1", port), timeout=10) as client:
            accepted, _ = server.accept()
            client.sendall(b"hello")
            with accepted:
                return [host, accepted.recv(5).decode()]


@use
def a_port_without_an_address() -> object:
    with socket.socket() as server:
        server.listen()
        return server.getsockname()[0]


@use
def its_own_port_by_ipv6() -> object:
    with socket.create_server(("::", 0), family=socket.AF_INET6) as server:
        return server.getsockname()[0]


@use
def its_own_unix_socket() -> object:
    with socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as client:
        server.bind("own")
        server.listen()
        client.connect(str(Path("own").resolve()))
        return "connected"


@use
def another_port() -> object:
    socket.create_connection(("127.0.0.1", PORT), timeout=10).close()
    return "connected"


@use
def another_machine() -> object:
    socket.create_connection(("192.0.2.1", 80), timeout=10).close()
    return "connected"


@use
def a_port_that_it_had() -> object:
    """Connect to a port that this program has closed: by now, it could belong to another program."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    socket.create_connection(("127.0.0.1", port), timeout=10).close()
    return "connected"


@use
def a_foreign_unix_socket() -> object:
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(FOREIGN)
        return "connected"


@use
def a_foreign_unix_socket_by_a_link() -> object:
    Path("link").symlink_to(FOREIGN)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect("link")
        return "connected"


@use
def a_foreign_unix_socket_by_a_linked_directory() -> object:
    Path("folder").symlink_to(Path(FOREIGN).parent)
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"folder/{Path(FOREIGN).name}")
        return "connected"


@use
def a_unix_socket_elsewhere() -> object:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{FOREIGN}-new")
        return "bound"


@use
def an_abstract_socket() -> object:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("\0name")
        return "bound"


@use
def datagrams() -> object:
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).close()
    return "made"


@use
def fast_open() -> object:
    with socket.socket() as client:
        client.sendto(b"x", 0x20000000, ("127.0.0.1", PORT))
        return "sent"


@use
def a_privileged_port() -> object:
    socket.create_server(("127.0.0.1", 81)).close()
    return "bound"


@use
def scheduling_of_its_thread() -> object:
    """Set the scheduling policy of another thread of this program, as the library libzmq does for its threads."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    assert thread.native_id is not None
    try:
        os.sched_setscheduler(thread.native_id, os.SCHED_OTHER, os.sched_param(0))
    finally:
        done.set()
        thread.join()
    return "set"


@use
def scheduling_of_the_warden() -> object:
    os.sched_setscheduler(os.getppid(), os.SCHED_IDLE, os.sched_param(0))
    return "set"


def main() -> None:
    found = {}
    for name, one in USES.items():
        try:
            found[name] = one()
        except OSError as error:
            found[name] = type(error).__name__ if error.errno is None else os.strerror(error.errno)
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
