"""A real disk that may be filled: a file system in memory, which takes a mount, and so root on Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LACKING: Final = "" if sys.platform == "linux" and os.geteuid() == 0 else "only root on Linux mounts a file system"
"""Why there can be none; empty: there can, if the machine lets root mount."""


class SmallDisk:
    """A file system of its own, which can be filled up."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ballast = directory / "ballast"

    def fill(self, *, leave_bytes: int = 0) -> None:
        """Takes all room that is left, but `leave_bytes`."""
        block = bytes(2**20)
        with self.ballast.open("wb", buffering=0) as file:
            while block:
                try:
                    file.write(block)
                except OSError:
                    block = block[: len(block) // 2]
            file.truncate(file.tell() - leave_bytes)

    def empty(self) -> None:
        """Gives that room back."""
        self.ballast.unlink()


@contextmanager
def mounted(directory: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """At `directory` until the end. Raises OSError where this machine does not let it be mounted."""
    directory.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip())
    try:
        yield SmallDisk(directory)
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
