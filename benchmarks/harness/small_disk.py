"""A disk of limited size: a file system in memory, which only root on Linux can mount."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

LACKING: Final = "" if sys.platform == "linux" and os.geteuid() == 0 else "only root on Linux mounts a file system"
"""The reason why this machine cannot have such a disk; "" if it can."""


class SmallDisk:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.ballast = directory / "ballast"

    def fill(self, *, leave_bytes: int = 0) -> None:
        """Fill the disk until only `leave_bytes` bytes are free."""
        block = bytes(2**20)
        with self.ballast.open("wb", buffering=0) as file:
            while block:
                try:
                    file.write(block)
                except OSError:
                    block = block[: len(block) // 2]
            file.truncate(file.tell() - leave_bytes)

    def empty(self) -> None:
        self.ballast.unlink()


@contextmanager
def mounted(directory: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Mount a file system at `directory` during the block. Raises OSError if that is impossible."""
    directory.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(directory)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip())
    try:
        yield SmallDisk(directory)
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)
