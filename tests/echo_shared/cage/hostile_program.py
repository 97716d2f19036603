"""A program of an environment that attacks the machine: `python hostile_program.py PLACE TARGETS`.

PLACE is where it attacks from: `bare` (no cage), `server` (the process that holds sessions) or `session` (a fork). It
prints a JSON object: for each attempt "done" or the error.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

from tests.echo_node.prying_worker import ATTEMPTS, LINUX, Targets, call

MORE = {}


def attempt(function):
    MORE[function.__name__] = function
    return function


@attempt
def read_the_wardens_environment(targets: Targets) -> None:
    Path(f"/proc/{targets['warden']}/environ").read_bytes()


@attempt
def read_the_hubs_environment(targets: Targets) -> None:
    Path(f"/proc/{targets['hub']}/environ").read_bytes()


@attempt
def read_the_hubs_open_files(targets: Targets) -> None:
    list(Path(f"/proc/{targets['hub']}/fd").iterdir())


@attempt
def read_by_a_link_in_its_own_directory(targets: Targets) -> None:
    Path("way").symlink_to(targets["private"])
    Path("way").read_bytes()


@attempt
def signal_the_hub(targets: Targets) -> None:
    os.kill(targets["hub"], 0)


@attempt
def signal_its_process_group(_: Targets) -> None:
    """Send a signal to a process outside the cage: number 1, and signal 0, which does nothing. A real signal to all
    processes, kill(-1), would end this machine's if the test ran without a cage.
    """
    os.kill(1, 0)


@attempt
def limit_the_hub(targets: Targets) -> None:
    limits = resource.prlimit(targets["hub"], resource.RLIMIT_CORE)
    resource.prlimit(targets["hub"], resource.RLIMIT_CORE, limits)


@attempt
def find_a_secret_in_its_environment(_: Targets) -> None:
    if "ECHO_TEST_SECRET" not in os.environ:
        raise PermissionError("no secret")


@attempt
def find_the_hubs_open_file(targets: Targets) -> None:
    if not any(os.path.samestat(os.fstat(number), Path(targets["open"]).stat()) for number in _descriptors()):
        raise PermissionError("no descriptor")


def _descriptors() -> list[int]:
    found = []
    for number in range(1024):
        try:
            os.fstat(number)
        except OSError:
            continue
        found.append(number)
    return found


@attempt
def hide_memory_from_its_limits(_: Targets) -> None:
    os.close(os.memfd_create("hidden"))


@attempt
def type_into_a_terminal(_: Targets) -> None:
    """Call TIOCSTI on a descriptor that is no terminal. Without a cage, the error is ENOTTY."""
    import fcntl
    import termios

    try:
        fcntl.ioctl(1, termios.TIOCSTI, b"x")
    except OSError as error:
        if error.errno == 1:
            raise


@attempt
def make_its_own_users(_: Targets) -> None:
    """Create a new user namespace with unshare."""
    call("syscall", ctypes.c_long(272), ctypes.c_long(0x10000000))


def outcome(function, targets: Targets) -> str:
    try:
        function(targets)
    except (OSError, subprocess.SubprocessError) as error:
        return repr(error)
    return "done"


def attack(targets: Targets) -> None:
    found = {name: outcome(one, targets) for name, one in (ATTEMPTS | LINUX | MORE).items()}
    print(json.dumps(found), flush=True)


def main() -> None:
    place, text = sys.argv[1:]
    targets = json.loads(text)
    targets["warden"] = os.getppid()
    if place != "session":
        targets["derived"] = str(Path.cwd())
        attack(targets)
        return
    if pid := os.fork():
        os.waitpid(pid, 0)
        return
    try:
        targets["derived"] = sys.modules["session_cage"].enter()
        attack(targets)
    finally:
        os._exit(0)


if __name__ == "__main__":
    main()
