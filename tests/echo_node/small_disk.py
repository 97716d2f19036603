"""A real disk that a test may fill: a file system in memory, which takes a mount, and so root on Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_mounts = pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0, reason="only root on Linux mounts a file system"
)


@contextmanager
def small_disk(directory: Path, size_bytes: int) -> Iterator[Path]:
    """Mounted at `directory` until the end."""
    directory.mkdir(parents=True, exist_ok=True)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size_bytes},mode=700", "tmpfs", str(directory)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this machine does not let a test mount a file system")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "--lazy", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """The file that takes all the room there is."""
    file = directory / "filler"
    with file.open("wb", buffering=0) as filler:
        for size in (65_536, 4_096, 1):
            try:
                while filler.write(bytes(size)) == size:
                    pass
            except OSError:
                continue
    return file
