"""The cage (sandbox) of sessions, from inside: a process that holds sessions calls these functions.

The launcher puts a process into its cage before any code of an environment is loaded. Then, in each forked child,
`enter` puts one session into a narrower cage. The warden, outside the cage, enforces the limits that the kernel does
not: it gets notes from this process, and answers with the causes of the sessions that it ended.

Needs only the standard library, because the interpreter of an environment may lack all packages of Echo.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import signal
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from echo_shared.cage import landlock, linux, seccomp, session_calls, syscalls
from echo_shared.cage.landlock import READ, WRITE, AccessRights
from echo_shared.cage.session_terms import MIB, SessionTerms

if sys.platform != "win32":
    import resource

OUT_OF_MEMORY_STATUS: Final = 70
"""Exit status of a session's process that ran out of memory."""
_PR_CAPBSET_DROP: Final = 24
_PR_SET_PDEATHSIG: Final = 1
_PR_SET_DUMPABLE: Final = 4
_LAST_CAPABILITY: Final = 63
_CAPSET: Final = {"x86_64": 126, "aarch64": 91}
_CAPABILITY_VERSION: Final = 0x20080522
_FORBIDDEN: Final = (errno.EACCES, errno.EPERM)
_SYSTEM_FACTS: Final = (
    *("/etc/mime.types", "/etc/httpd/conf/mime.types", "/etc/ssl/certs", "/etc/pki/tls/certs", "/etc/pki/ca-trust"),
    *("/etc/hosts", "/etc/host.conf", "/etc/nsswitch.conf", "/etc/gai.conf", "/etc/protocols", "/etc/services"),
    *("/etc/inputrc", "/etc/terminfo", "/etc/python3", "/etc/mailcap", "/etc/debian_version"),
)
"""Files without secrets that programs of environments read: types of files, certificates, names of this machine."""
_SESSION_FILES: Final = 256
"""Maximum number of open files of one session. It bounds the memory in buffers of pipes and sockets, which no other
limit counts.
"""
_SOME_PID: Final = 0x7FFF_FFF1
"""Number that stands for the process id in a prepared filter. Linux gives no process an id this high."""
_NO_DUMP: Final = (1, 1)
"""Soft and hard limit on the size of core dumps, in bytes. At 1 byte, the kernel starts no program that collects dumps;
at 0 it would.
"""


class _Entered:
    """State of the cage (sandbox) in this process."""

    terms: SessionTerms | None = None
    notes = -1
    """Descriptor of the pipe through which this process sends notes to the warden; -1 before it enters the cage."""
    causes = -1
    """Descriptor of the pipe from which this process reads why the warden ended sessions; -1 before it enters the cage.
    """
    session_filter: seccomp.Filter
    """The filter of system calls for a session's process."""
    session_rules: landlock.Rules
    """Files and ports that a session's process may use, besides its own directory."""
    size = ""
    """File in /proc with the memory size of the process that holds the sessions."""
    known: dict[str, str]
    """Reasons why the warden ended sessions, until a caller reads them. The key is the session's process id, or its
    directory if the terms allow programs.
    """


_now = _Entered()


class _Broken(Exception):
    """Error: an attempt to break the cage has succeeded."""


def unsupported(terms: SessionTerms | None = None) -> str:
    """Return why this system cannot cage sessions with these terms; "" if it can."""
    processor = platform.machine()
    if os.name != "posix" or not hasattr(os, "fork") or not Path("/proc/self/task").is_dir():
        return f"sessions have a cage on Linux only, and this is {platform.system()}"
    if processor not in syscalls.PROCESSORS or struct.calcsize("P") != 8:
        return f"Echo has no filter of system calls for {processor} with {8 * struct.calcsize('P')} bits"
    try:
        version = landlock.abi()
    except OSError as error:
        return error.strerror or str(error)
    needed, what = landlock.TRUNCATING_ABI, "that limits the emptying of files (Linux 6.2)"
    if terms is not None and (terms.connects or terms.listens):
        needed, what = landlock.PORTS_ABI, "that limits ports (Linux 6.7)"
    if terms is not None and terms.children == "programs":
        needed, what = landlock.SCOPES_ABI, "that limits signals (Linux 6.12)"
    return (
        "" if version >= needed else f"this kernel has Landlock {version}, and sessions need Landlock {needed}, {what}"
    )


def enter_server(terms: SessionTerms, notes: int, causes: int) -> int | None:
    """Put this process, which is to hold sessions, into its cage. `notes` and `causes`: pipes to and from the warden.

    If the terms allow programs, return the descriptor at which the warden receives system calls to decide about; else
    None. Call this before any thread starts. Raises OSError if a part of the cage is missing; the process must end
    then.
    """
    version = landlock.abi()
    _now.terms, _now.notes, _now.causes, _now.size, _now.known = terms, notes, causes, f"/proc/{os.getpid()}/statm", {}
    os.set_blocking(notes, False)
    os.set_blocking(causes, False)
    for descriptor in (notes, causes):
        # Programs of sessions must not inherit the pipes: they could send notes to the warden.
        os.set_inheritable(descriptor, False)
    landlock.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # The kernel kills this process when the warden ends.
    _own_place(terms.directory)
    _limit(terms)
    hidden = _files(terms.hidden)
    _drop_capabilities()
    rules = _server_rules(terms)
    if terms.children == "forks":
        program = session_calls.program(
            platform.machine(), _SOME_PID, children="none", connects=bool(terms.connects), listens=False, scoped=False
        )
        _now.session_filter = seccomp.Filter(program, _SOME_PID)
        _now.session_rules = landlock.Rules(version, rules, terms.connects, own=WRITE)
    landlock.restrict(version, {**rules, **_own_rules(terms)}, terms.connects, listens=terms.listens)
    listener = _filter(terms, version)
    try:
        _try(hidden)
    except _Broken as broken:
        raise OSError(errno.ENOTRECOVERABLE, str(broken)) from broken
    return listener


def hand_over(listener: int) -> None:
    """Give the warden the descriptor at which it answers system calls, and wait until the warden has it.

    Then close the descriptor in this process: with it, a caged process could answer its own calls. Raises OSError if
    the warden cannot take it.
    """
    _note(f"listener {listener}")
    os.set_blocking(_now.causes, True)
    said = os.read(_now.causes, 4096)
    os.set_blocking(_now.causes, False)
    os.close(listener)
    if not said.startswith(b"0 supervised"):
        raise OSError(errno.EPERM, "the warden may not watch this process (kernel.yama.ptrace_scope)")


def enter() -> str:
    """Put this process, a fork of a process that holds sessions, into the cage of one session. Return the session's
    directory.

    Call this before any thread starts and before anything untrusted is read. Raises OSError if a part is missing; the
    process must end then. This function calls few others, because each Python function that a fork runs copies some
    pages of memory.
    """
    terms = _terms()
    own = f"{terms.directory}/{os.getpid()}"
    os.mkdir(own, 0o700)  # noqa: PTH102 - pathlib touches many pages.
    _own_place(own)
    os.close(_now.notes)
    os.close(_now.causes)
    memory = _mapped_bytes() + terms.memory_bytes
    _set_limit(resource.RLIMIT_AS, memory, memory)
    _set_limit(resource.RLIMIT_NOFILE, _SESSION_FILES, _SESSION_FILES)
    _now.session_rules.apply(own)
    _now.session_rules.close()
    _now.session_filter.load(seccomp.ALL_THREADS)
    landlock.prctl(_PR_SET_DUMPABLE, 0)
    return own


def allow_cpu(session: int | str) -> None:
    """Begin a step of a session: from now on, it may use `step_cpu_s` of processor time.

    `session` is a process id; with `programs`, it is the name of the programs' working directory.
    """
    _note(f"step {session}")


def end(pid: int) -> None:
    """Kill the session in process `pid`, a child of this process, with all processes that it started."""
    _note(f"end {pid}")
    # Before ABI 6, Landlock may forbid this signal. The warden, which got the note, kills the session then.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def cause(pid: int, status: int) -> str:
    """Return which limit ended the session in process `pid`; "" if none. `status` is the result of `os.waitpid`."""
    if _now.terms is not None:
        _read_causes()
        if said := _now.known.pop(str(pid), ""):
            return said
    return memory_cause() if os.waitstatus_to_exitcode(status) == OUT_OF_MEMORY_STATUS else ""


def cause_of(name: str) -> str:
    """Return why the warden ended the program whose working directory has this name; "" if the warden did not
    end it.
    """
    if _now.terms is None:
        return ""
    _read_causes()
    return _now.known.pop(name, "")


def named(error: BaseException) -> str:
    """Return the limit of the cage that made an environment raise this exception; "" if no limit did."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return memory_cause()
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return "processes: it started more threads than its memory allows"
    if not isinstance(error, OSError) or _now.terms is None:
        return ""
    if error.errno == errno.EFBIG:
        return f"files: it wrote a file of more than {_now.terms.file_bytes // MIB} MB"
    if error.errno == errno.EMFILE:
        return "files: it opened too many files at once"
    if error.errno == errno.EAFNOSUPPORT or (error.errno in _FORBIDDEN and error.filename is None):
        return f"forbidden: it used a connection, program or process that the cage refuses ({error.strerror})"
    if error.errno in _FORBIDDEN:
        return f"forbidden: it used the file {error.filename}"
    return ""


def memory_cause() -> str:
    """Return the text that names the memory limit as the cause of a session's end."""
    most = "" if _now.terms is None else f" of more than {_now.terms.memory_bytes // MIB} MB"
    return f"memory: it asked for memory{most}"


def _terms() -> SessionTerms:
    if _now.terms is None:
        raise OSError(errno.ENOTSUP, "this process was not started by the cage's launcher")
    return _now.terms


def _note(text: str) -> None:
    if _now.notes >= 0:
        # If the pipe is full, the note is lost. A lost note can only make the warden allow less.
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            os.write(_now.notes, f"{text}\n".encode())


def _read_causes() -> None:
    """Read all complete lines that the warden has written. Each write of the warden is one line, and is atomic."""
    with contextlib.suppress(BlockingIOError):
        while piece := os.read(_now.causes, 65_536):
            for line in piece.decode(errors="replace").splitlines():
                name, _, text = line.partition(" ")
                _now.known[name] = text


def _own_place(directory: str) -> None:
    """Make `directory` the working, home and temporary directory of this process."""
    os.chdir(directory)
    os.environ["HOME"] = os.environ["TMPDIR"] = directory
    tempfile.tempdir = None  # Clear tempfile's cached directory.


def _limit(terms: SessionTerms) -> None:
    """Set the kernel's limits on this process and its forks, as limits that they cannot raise again."""
    memory = (16 if terms.children == "programs" else 4) * terms.memory_bytes + 4096 * MIB
    limits = {
        resource.RLIMIT_AS: (memory, memory),
        resource.RLIMIT_CORE: _NO_DUMP,
        resource.RLIMIT_FSIZE: (terms.file_bytes, terms.file_bytes),
        resource.RLIMIT_NOFILE: (terms.open_files, terms.open_files),
        resource.RLIMIT_MEMLOCK: (0, 0),
        resource.RLIMIT_MSGQUEUE: (0, 0),
        resource.RLIMIT_RTPRIO: (0, 0),
    }
    for kind, (soft, hard) in limits.items():
        _set_limit(kind, soft, hard)


def _set_limit(kind: int, soft: int, hard: int) -> None:
    """Set a limit of this process. If the process has a lower limit, keep that."""
    _, most = resource.getrlimit(kind)
    if most != resource.RLIM_INFINITY:
        soft, hard = min(soft, most), min(hard, most)
    resource.setrlimit(kind, (soft, hard))


def _mapped_bytes() -> int:
    """Return the size of the address space of the process that holds the sessions."""
    file = os.open(_now.size, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return int(os.read(file, 64).split()[0]) * os.sysconf("SC_PAGE_SIZE")
    finally:
        os.close(file)


def _drop_capabilities() -> None:
    """Give up all of root's rights (capabilities) that this process has. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    for capability in range(_LAST_CAPABILITY + 1):
        # The call fails for unknown capabilities, and for a process that has no rights to give up. Both are harmless.
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)
    header = struct.pack("=Ii", _CAPABILITY_VERSION, 0)
    if libc.syscall(ctypes.c_long(_CAPSET[platform.machine()]), header, bytes(24)):
        raise OSError(ctypes.get_errno(), f"capset: {os.strerror(ctypes.get_errno())}")


def _server_rules(terms: SessionTerms) -> dict[Path, AccessRights]:
    runs = terms.children == "programs"
    execute = AccessRights.EXECUTE if runs else AccessRights(0)
    rules = linux.basic_rules(map(Path, terms.reads), READ | execute)
    rules |= dict.fromkeys(map(Path, _SYSTEM_FACTS), READ)
    if runs:
        rules |= dict.fromkeys(map(Path, ("/bin", "/sbin")), READ | execute)
    return dict(_around(rules, [Path(one) for one in terms.hidden]))


def _own_rules(terms: SessionTerms) -> dict[Path, AccessRights]:
    """Return Landlock's rule for the directory of the server (the process that holds the sessions)."""
    own = WRITE
    if terms.children == "programs":
        own |= AccessRights.EXECUTE | AccessRights.MAKE_SYM | AccessRights.MAKE_FIFO | AccessRights.MAKE_SOCK
    return {Path(terms.directory): own}


def _around(rules: Mapping[Path, AccessRights], hidden: Sequence[Path]) -> Iterator[tuple[Path, AccessRights]]:
    """Yield the rules without the hidden paths: a directory that contains a hidden path is replaced by its other
    entries.

    The names of the hidden files stay visible, because Python must be able to list the directories on its import path.
    """
    for path, rights in rules.items():
        if not any(one.is_relative_to(path) for one in hidden):
            yield path, rights
        elif path not in hidden:
            yield path, rights & AccessRights.READ_DIR
            with contextlib.suppress(OSError):
                yield from _around(dict.fromkeys(path.iterdir(), rights), hidden)


def _filter(terms: SessionTerms, version: int) -> int | None:
    scoped = version >= landlock.SCOPES_ABI
    program = session_calls.program(
        platform.machine(),
        os.getpid(),
        children=terms.children,
        connects=bool(terms.connects),
        listens=bool(terms.listens),
        scoped=scoped,
    )
    if terms.children == "programs":
        return seccomp.load(program, seccomp.NEW_LISTENER)
    seccomp.load(program, seccomp.ALL_THREADS)
    return None


def _files(hidden: Iterable[str]) -> list[Path]:
    """Return the hidden files and directories as files: every file that must not be readable."""
    found = []
    for path in map(Path, hidden):
        with contextlib.suppress(OSError):
            found += [one for one in path.iterdir() if one.is_file()] if path.is_dir() else [path]
    return found


def _try(hidden: Iterable[Path]) -> None:
    """Try to break the cage. Raises OSError if an attempt succeeds."""
    for path in hidden:
        with contextlib.suppress(OSError):
            path.open("rb").close()
            raise _Broken(f"the cage does not hide {path}")
    with contextlib.suppress(OSError):
        os.kill(os.getppid(), 0)
        raise _Broken("the cage does not keep signals from other processes")
