"""The cage (sandbox) on macOS: a sandbox profile that the process applies to itself with `sandbox_init`.

The function `sandbox_init` and the program `sandbox-exec` are both deprecated, and use the same kernel extension. The
function needs no second program, reports errors in a profile, and can be called later, when the model's directory is
known. The last matching rule of a profile wins. Metal compiles and computes in system services, so the profile allows
by default, and refuses files, network, programs and other processes by name.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from echo_shared.cage import interpreter
from echo_shared.cage.description import Cage, Held

_SYSTEM: Final = (
    *("/System", "/Library", "/usr", "/bin", "/sbin", "/dev", "/opt/homebrew", "/opt/local", "/Applications/Xcode.app"),
    *("/private/etc", "/private/var/db/timezone", "/private/var/db/dyld", "/private/preboot"),
)
_USER_CACHE: Final = 65_538
"""Name of _CS_DARWIN_USER_CACHE_DIR for confstr(3): the directory of Metal's compile cache."""


def enter(cage: Cage) -> Held:
    """Limit this process with a sandbox profile, for the rest of its life. See `entering.enter`."""
    try:
        _apply(profile(cage, reads=interpreter.directories(), gpu_caches=_gpu_caches() if cage.gpu else ()))
    except (OSError, AttributeError) as error:
        return Held.to_nothing(f"the system's sandbox refuses: {error}")
    return Held(by=("macOS's sandbox",))


def profile(cage: Cage, *, reads: Iterable[Path], gpu_caches: Iterable[Path]) -> str:
    """Return the rules in the sandbox's own language. `reads`: directories of Python and its libraries."""
    writable = [*(path.resolve() for path in cage.writes), *gpu_caches]
    readable = [*map(Path, _SYSTEM), *reads, *(path.resolve() for path in cage.reads), *writable]
    rules = [
        "(version 1)",
        "(allow default)",
        "(deny file-read-data file-read-xattr)",
        f'(allow file-read-data file-read-xattr (literal "/") {_below(readable)})',
        "(deny file-write*)",
        '(allow file-write-data (literal "/dev/null") (literal "/dev/dtracehelper"))',
        *([f"(allow file-write* {_below(writable)})"] if writable else []),
        "(deny network*)",
        *(f'(allow network-outbound (remote tcp "*:{port}"))' for port in cage.connects),
        *(['(allow network-inbound (local tcp "localhost:*"))'] if cage.connects else []),
        "(deny process-exec* process-fork)",
        "(deny signal (target others))",
        "(deny process-info* (target others))",
        "(deny mach-priv-task-port)",
        "(deny appleevent-send lsopen job-creation)",
    ]
    return "\n".join(rules)


def _below(paths: Iterable[Path]) -> str:
    return " ".join(f"(subpath {_quoted(path)})" for path in dict.fromkeys(paths))


def _quoted(path: Path) -> str:
    text = str(path).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'


def _gpu_caches() -> tuple[Path, ...]:
    try:
        cache = os.confstr(_USER_CACHE)
    except (OSError, ValueError):
        return ()
    return (Path(cache).resolve(),) if cache else ()


def _apply(text: str) -> None:
    """Apply the profile. Raises OSError with the sandbox's message."""
    library = ctypes.CDLL("/usr/lib/libSystem.B.dylib", use_errno=True)
    initialise = library.sandbox_init
    initialise.argtypes = (ctypes.c_char_p, ctypes.c_uint64, ctypes.POINTER(ctypes.c_char_p))
    said = ctypes.c_char_p()
    if initialise(text.encode(), 0, ctypes.byref(said)):
        raise OSError((said.value or b"no reason given").decode(errors="replace"))
