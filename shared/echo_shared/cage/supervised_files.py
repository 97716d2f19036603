"""Change modes and times of files on behalf of a caged process, because Landlock does not control these system calls.

Only files below one directory may be changed. The file is opened first; then its place is checked and the call is made
on the open file. So the caller cannot replace the file between check and call.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from echo_shared.cage import tracing

FILE_CALLS = ("chmod", "fchmod", "fchmodat", "fchmodat2", "utimensat")
_HERE = -100
"""AT_FDCWD: a path is relative to the caller's working directory."""
_NO_FOLLOW = 0x100
_MODES = 0o777
"""Mode bits that a caller may set: permissions to read, write and execute, but not setuid, setgid or sticky."""
_TIMES_BYTES = 32
_LONGEST_PATH = 4096
_PATH = getattr(os, "O_PATH", 0)


class CallerFiles:
    """Changes files below the directory `root` for callers (caged processes), which name the files by their own paths
    and descriptors.
    """

    def __init__(self, root: str) -> None:
        self._root = os.path.realpath(root)

    def make(self, name: str, thread: int, arguments: list[int]) -> int:
        """Make the system call `name` in place of a thread; return its errno, 0 for success. Raises OSError."""
        folder, path, value, flags = _HERE, 0, 0, 0
        match name:
            case "chmod":
                path, value = arguments[:2]
            case "fchmod":
                folder, value = _signed(arguments[0]), arguments[1]
            case "fchmodat":
                folder, path, value = _signed(arguments[0]), *arguments[1:3]
            case _:
                folder, path, value, flags = _signed(arguments[0]), *arguments[1:4]
        text = os.fsdecode(_text(thread, path)) if path else ""
        times = tracing.memory(thread, value, _TIMES_BYTES) if name == "utimensat" and value else None
        if times is not None and len(times) < _TIMES_BYTES:
            return errno.EFAULT
        with self.opened(_place(thread, folder, text), follow=not flags & _NO_FOLLOW) as opened:
            target = f"/proc/self/fd/{opened}"
            if name != "utimensat":
                Path(target).chmod(value & _MODES)
                return 0
            libc = ctypes.CDLL(None, use_errno=True)
            return 0 if libc.utimensat(_HERE, os.fsencode(target), times, 0) == 0 else ctypes.get_errno()

    @contextmanager
    def opened(self, place: str, *, follow: bool = True) -> Iterator[int]:
        """Open a file or directory, and yield its descriptor. Raises PermissionError unless it is below the root."""
        found = os.open(place, _PATH | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW))
        try:
            real = Path(f"/proc/self/fd/{found}").readlink()
            if not real.is_relative_to(self._root):
                raise PermissionError(errno.EACCES, "outside the directory", str(real))
            yield found
        finally:
            os.close(found)


def _place(thread: int, folder: int, text: str) -> str:
    """Return the path at which this process finds the file that the thread names `text`, relative to its open directory
    `folder`. If `text` is empty, that is `folder` itself.
    """
    start = f"/proc/{thread}/cwd" if folder == _HERE else f"/proc/{thread}/fd/{folder}"
    if not text:
        return start
    if text.startswith("/proc/self/"):
        return f"/proc/{thread}/{text.removeprefix('/proc/self/')}"
    return text if text.startswith("/") else f"{start}/{text}"


def _text(thread: int, address: int) -> bytes:
    found = b""
    while len(found) < _LONGEST_PATH:
        piece = tracing.memory(thread, address + len(found), 4_096 - (address + len(found)) % 4_096)
        found += piece
        if b"\0" in piece:
            return found.partition(b"\0")[0]
        if not piece:
            break
    raise OSError(errno.EFAULT, "the path cannot be read")


def _signed(number: int) -> int:
    return ctypes.c_int32(number & 0xFFFFFFFF).value
