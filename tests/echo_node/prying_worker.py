"""The real worker around an engine that tries to break out of its cage; tests start it in place of the real worker.

`targets.json` next to the base model names the targets. The engine reports its results as its precision: for each
attempt "done" or the error.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echo_node.backends import registry, worker
from echo_node.backends.base import EngineSettings
from tests.echo_node.odd_worker import OddEngine

Targets = dict[str, Any]
ATTEMPTS: dict[str, Callable[[Targets], object]] = {}
LINUX: dict[str, Callable[[Targets], object]] = {}
"""Attempts to break out with system calls that only Linux has."""


def attempt(function: Callable[[Targets], object]) -> Callable[[Targets], object]:
    ATTEMPTS[function.__name__] = function
    return function


def on_linux(function: Callable[[Targets], object]) -> Callable[[Targets], object]:
    LINUX[function.__name__] = function
    return function


def call(name: str, *arguments: object) -> int:
    result: int = getattr(ctypes.CDLL(None, use_errno=True), name)(*arguments)
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


# Reading


@attempt
def read_a_file(targets: Targets) -> None:
    assert Path(targets["private"]).read_bytes() == b"private"


@attempt
def read_a_file_in_a_thread(targets: Targets) -> None:
    caught: list[BaseException] = []

    def read() -> None:
        try:
            read_a_file(targets)
        except OSError as error:
            caught.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    thread.join()
    if caught:
        raise caught[0]


@attempt
def read_a_file_by_a_link(targets: Targets) -> None:
    link = Path(targets["derived"]) / "link"
    link.symlink_to(targets["private"])
    link.read_bytes()


@attempt
def read_by_the_working_directory(targets: Targets) -> None:
    os.chdir(Path(targets["private"]).parent)
    Path("private").read_bytes()


@attempt
def list_a_directory(targets: Targets) -> None:
    list(Path(targets["private"]).parent.iterdir())


@on_linux
def read_the_parents_environment(_: Targets) -> None:
    Path(f"/proc/{os.getppid()}/environ").read_bytes()


@on_linux
def read_the_parents_memory(_: Targets) -> None:
    os.close(os.open(f"/proc/{os.getppid()}/mem", os.O_RDONLY))


@on_linux
def read_the_parents_command(_: Targets) -> None:
    Path(f"/proc/{os.getppid()}/cmdline").read_bytes()


@on_linux
def watch_a_directory(targets: Targets) -> None:
    watch = call("inotify_init")
    call("inotify_add_watch", watch, str(Path(targets["private"]).parent).encode(), 0x100)


# Writing


@attempt
def make_a_file(targets: Targets) -> None:
    Path(targets["scratch"], "new").touch()


@attempt
def overwrite_a_file(targets: Targets) -> None:
    Path(targets["victim"]).write_bytes(b"overwritten")


@attempt
def overwrite_its_model(targets: Targets) -> None:
    Path(targets["base"], "weights").write_bytes(b"others")


@attempt
def empty_a_file(targets: Targets) -> None:
    os.truncate(targets["victim"], 0)


@attempt
def empty_its_model(targets: Targets) -> None:
    os.close(os.open(Path(targets["base"], "weights"), os.O_RDONLY | os.O_TRUNC))


@attempt
def rename_a_file(targets: Targets) -> None:
    renamed = Path(targets["victim"]).rename(targets["victim"] + ".renamed")
    renamed.rename(targets["victim"])


@attempt
def move_a_file_to_where_it_writes(targets: Targets) -> None:
    moved = Path(targets["victim"]).rename(Path(targets["derived"]) / "moved")
    moved.rename(targets["victim"])


@attempt
def link_a_file_to_where_it_writes(targets: Targets) -> None:
    Path(targets["derived"], "linked").hardlink_to(targets["victim"])


@attempt
def let_others_read_a_file(targets: Targets) -> None:
    Path(targets["victim"]).chmod(0o666)


@attempt
def date_a_file_back(targets: Targets) -> None:
    os.utime(targets["victim"], (0, 0))


@on_linux
def mark_a_file(targets: Targets) -> None:
    os.setxattr(targets["victim"], "user.mark", b"x")


@attempt
def delete_a_file(targets: Targets) -> None:
    Path(targets["doomed"]).unlink()


# The network


@attempt
def connect_by_tcp(targets: Targets) -> None:
    socket.create_connection(("127.0.0.1", targets["tcp"]), timeout=10).close()


@attempt
def send_by_udp(targets: Targets) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        udp.sendto(b"x", ("127.0.0.1", targets["udp"]))


@attempt
def listen(_: Targets) -> None:
    socket.create_server(("127.0.0.1", 0)).close()


@attempt
def connect_to_a_unix_socket(targets: Targets) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.connect(targets["unix"])


@on_linux
def connect_to_an_abstract_socket(targets: Targets) -> None:
    with socket.socket(socket.AF_UNIX) as unix:
        unix.connect("\0" + targets["abstract"])


@on_linux
def connect_a_sequenced_socket(targets: Targets) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sequenced:
        sequenced.connect(targets["sequenced"])


@on_linux
def give_a_socket_a_file(targets: Targets) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sequenced:
        sequenced.bind(str(Path(targets["scratch"]) / "socket"))


@on_linux
def accept_a_connection(_: Targets) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sequenced:
        sequenced.bind("")  # An empty name lets Linux choose an abstract one.
        sequenced.listen()
        sequenced.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            sequenced.accept()


@on_linux
def send_from_a_pair_of_datagram_sockets(targets: Targets) -> None:
    for one in socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM):
        with one:
            one.sendto(b"x", targets["unix_datagrams"])


@on_linux
def talk_to_the_kernel(_: Targets) -> None:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()


@on_linux
def queue_calls_past_the_filter(_: Targets) -> None:
    """Call io_uring_setup, which has one number on all processors: calls queued in a ring bypass the filter."""
    os.close(call("syscall", ctypes.c_long(425), ctypes.c_long(1), ctypes.create_string_buffer(256)))


# Programs


@attempt
def start_a_program(_: Targets) -> None:
    subprocess.run([sys.executable, "-c", ""], check=True)


@attempt
def start_a_program_by_the_system(_: Targets) -> None:
    process = os.posix_spawn(sys.executable, [sys.executable, "-c", ""], {})
    assert os.waitpid(process, 0)[1] == 0


@attempt
def fork(_: Targets) -> None:
    if (process := os.fork()) == 0:
        os._exit(0)
    os.waitpid(process, 0)


@on_linux
def clone_the_new_way(_: Targets) -> None:
    """Call clone3. A filter cannot read its arguments, so in the cage the call must seem not to exist."""
    arguments = (ctypes.c_uint64 * 11)(*[0, 0, 0, 0, signal.SIGCHLD])
    process = call("syscall", ctypes.c_long(435), ctypes.byref(arguments), ctypes.c_long(ctypes.sizeof(arguments)))
    if process == 0:
        os._exit(0)
    os.waitpid(process, 0)


# Other processes


@attempt
def signal_the_parent(_: Targets) -> None:
    os.kill(os.getppid(), signal.SIGCONT)


@on_linux
def signal_the_parent_by_its_descriptor(_: Targets) -> None:
    descriptor = os.pidfd_open(os.getppid())
    signal.pidfd_send_signal(descriptor, signal.SIGCONT)


@on_linux
def trace_the_parent(_: Targets) -> None:
    """Use PTRACE_SEIZE: it does not stop the parent, and ends with this process."""
    call("ptrace", ctypes.c_long(0x4206), ctypes.c_long(os.getppid()), ctypes.c_long(0), ctypes.c_long(0))


@on_linux
def copy_the_parents_memory(targets: Targets) -> None:
    here = ctypes.create_string_buffer(8)
    local = (ctypes.c_void_p * 2)(ctypes.addressof(here), 8)
    remote = (ctypes.c_void_p * 2)(targets["address"], 8)
    one, none = ctypes.c_ulong(1), ctypes.c_ulong(0)
    call("process_vm_readv", os.getppid(), local, one, remote, one, none)
    assert here.raw == b"a secret"


@attempt
def renice_the_parent(_: Targets) -> None:
    os.setpriority(os.PRIO_PROCESS, os.getppid(), os.getpriority(os.PRIO_PROCESS, os.getppid()))


@on_linux
def limit_the_parent(_: Targets) -> None:
    import resource

    resource.prlimit(os.getppid(), resource.RLIMIT_CORE)


@on_linux
def share_memory(_: Targets) -> None:
    segment = call("shmget", 0, ctypes.c_size_t(4_096), 0o600)
    call("shmctl", segment, 0, None)


# The kernel


@on_linux
def leave_what_it_shares(_: Targets) -> None:
    """Unshare file descriptors: the only use of unshare that needs no privilege."""
    call("unshare", 0x400)


@on_linux
def watch_the_processor(_: Targets) -> None:
    """Count a software event of this process with perf_event_open."""
    attributes = ctypes.create_string_buffer(128)
    ctypes.c_uint32.from_buffer(attributes, 0).value = 1
    ctypes.c_uint32.from_buffer(attributes, 4).value = 128
    numbers = {"x86_64": 298, "aarch64": 241}
    minus = ctypes.c_long(-1)
    number = ctypes.c_long(numbers[os.uname().machine])
    os.close(call("syscall", number, attributes, ctypes.c_long(0), minus, minus, ctypes.c_long(0)))


class PryingEngine(OddEngine):
    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        targets = json.loads((base_dir / "targets.json").read_text())
        attempts = ATTEMPTS | (LINUX if sys.platform == "linux" else {})
        (derived_dir / "it writes here").write_bytes(b"x")
        self.precision = json.dumps({name: self._outcome(one, targets) for name, one in attempts.items()})
        return 1

    @staticmethod
    def _outcome(function: Callable[[Targets], object], targets: Targets) -> str:
        try:
            function(targets)
        except (OSError, subprocess.SubprocessError) as error:
            return repr(error)
        return "done"


if __name__ == "__main__":
    registry.make_engine = PryingEngine
    worker.main()
