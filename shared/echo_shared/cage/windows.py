"""The cage (sandbox) on Windows, limited to what a process can apply to itself: a job without further processes, and
low integrity.

A process of low integrity can write only to places marked for it, and cannot open its user's other processes. It can
still read and connect. Only a parent process can forbid these, with an AppContainer or a restricted token.

https://learn.microsoft.com/windows/win32/secauthz/mandatory-integrity-control
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from echo_shared.cage.description import Cage, Held
from echo_shared.cage.guards import Guard

_LOW_INTEGRITY: Final = "S-1-16-4096"
_LOW_LABEL: Final = "S:(ML;OICI;NW;;;LW)"
"""Label for a directory and everything below it: processes of low integrity may write there."""
_FILE_OBJECT: Final = 1
_LABEL_INFORMATION: Final = 0x10
_INTEGRITY_LEVEL: Final = 25
_INTEGRITY_ATTRIBUTE: Final = 0x20
_ADJUST_TOKEN: Final = 0x0080 | 0x0008
"""Windows' TOKEN_ADJUST_DEFAULT and TOKEN_QUERY: the rights to read and lower the process's integrity."""
_BASIC_LIMITS, _UI_RESTRICTIONS = 2, 4
_ONE_PROCESS, _END_ON_EXCEPTION = 0x8, 0x400
_ALL_UI: Final = 0xFF


class BasicLimits(ctypes.Structure):
    """Windows' JOBOBJECT_BASIC_LIMIT_INFORMATION."""

    _fields_ = (
        ("process_time", ctypes.c_int64),
        ("job_time", ctypes.c_int64),
        ("flags", ctypes.c_uint32),
        ("least_memory", ctypes.c_size_t),
        ("most_memory", ctypes.c_size_t),
        ("processes", ctypes.c_uint32),
        ("affinity", ctypes.c_size_t),
        ("priority", ctypes.c_uint32),
        ("scheduling", ctypes.c_uint32),
    )


class TokenLabel(ctypes.Structure):
    """Windows' TOKEN_MANDATORY_LABEL."""

    _fields_ = (("sid", ctypes.c_void_p), ("attributes", ctypes.c_uint32))


def enter(cage: Cage) -> Held:
    """Limit this process with a job and low integrity, for the rest of its life. See `entering.enter`."""
    lacks: dict[Guard, str] = {
        "reading": "Windows cannot keep a running process from reading",
        "network": "Windows cannot keep a running process from the network",
    }
    by: list[str] = []
    steps: list[tuple[str, tuple[Guard, ...], Callable[[], None]]] = [
        ("a job object", ("programs",), _enter_job),
        ("low integrity", ("writing", "processes"), lambda: _lower_integrity(cage.writes)),
    ]
    for name, guards, step in steps:
        try:
            step()
            by.append(name)
        except (OSError, AttributeError) as error:
            lacks |= dict.fromkeys(guards, f"{name}: {error}")
    return Held(by=tuple(by), lacks=lacks)


def one_process_limits() -> BasicLimits:
    return BasicLimits(flags=_ONE_PROCESS | _END_ON_EXCEPTION, processes=1)


def _enter_job() -> None:
    """Forbid further processes, and the use of the desktop: clipboard, other programs' windows, settings. Raises
    OSError.
    """
    kernel = _library("kernel32")
    kernel.CreateJobObjectW.restype = kernel.GetCurrentProcess.restype = ctypes.c_void_p
    job = ctypes.c_void_p(_checked(kernel.CreateJobObjectW(None, None)))
    limits, restrictions = one_process_limits(), ctypes.c_uint32(_ALL_UI)
    for kind, value in ((_BASIC_LIMITS, limits), (_UI_RESTRICTIONS, restrictions)):
        _checked(kernel.SetInformationJobObject(job, kind, ctypes.byref(value), ctypes.sizeof(value)))
    _checked(kernel.AssignProcessToJobObject(job, ctypes.c_void_p(kernel.GetCurrentProcess())))


def _lower_integrity(writes: tuple[Path, ...]) -> None:
    """Allow writes only below `writes` from now on. Raises OSError."""
    security, kernel = _library("advapi32"), _library("kernel32")
    for directory in writes:
        _open_to_low(security, directory)
    kernel.GetCurrentProcess.restype = ctypes.c_void_p
    token, sid = ctypes.c_void_p(), ctypes.c_void_p()
    process = ctypes.c_void_p(kernel.GetCurrentProcess())
    _checked(security.OpenProcessToken(process, _ADJUST_TOKEN, ctypes.byref(token)))
    _checked(security.ConvertStringSidToSidW(_LOW_INTEGRITY, ctypes.byref(sid)))
    label = TokenLabel(sid=sid, attributes=_INTEGRITY_ATTRIBUTE)
    size = ctypes.sizeof(label) + security.GetLengthSid(sid)
    _checked(security.SetTokenInformation(token, _INTEGRITY_LEVEL, ctypes.byref(label), size))


def _open_to_low(security: Any, directory: Path) -> None:
    descriptor, acl = ctypes.c_void_p(), ctypes.c_void_p()
    present, defaulted = ctypes.c_int(), ctypes.c_int()
    _checked(
        security.ConvertStringSecurityDescriptorToSecurityDescriptorW(_LOW_LABEL, 1, ctypes.byref(descriptor), None)
    )
    _checked(
        security.GetSecurityDescriptorSacl(
            descriptor, ctypes.byref(present), ctypes.byref(acl), ctypes.byref(defaulted)
        )
    )
    failed = security.SetNamedSecurityInfoW(str(directory), _FILE_OBJECT, _LABEL_INFORMATION, None, None, None, acl)
    if failed:
        raise OSError(0, f"{directory} cannot be marked as writable at low integrity: error {failed}")


def _library(name: str) -> Any:
    return ctypes.WinDLL(name, use_last_error=True)  # type: ignore[attr-defined,unused-ignore]


def _checked(result: int | None) -> int:
    if not result:
        raise ctypes.WinError(ctypes.get_last_error())  # type: ignore[attr-defined,unused-ignore]
    return result
