"""Disks of limited size for tests. A test is skipped if this machine cannot mount a file system."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from benchmarks.harness import small_disk
from benchmarks.harness.small_disk import LACKING, SmallDisk

__all__ = ["SmallDisk", "mounted", "needs_mounts"]

needs_mounts = pytest.mark.skipif(bool(LACKING), reason=LACKING)


@contextmanager
def mounted(directory: Path, size_bytes: int) -> Iterator[SmallDisk]:
    """Mount a disk of this size at `directory`; skip the test if this machine does not allow that."""
    if LACKING:
        pytest.skip(LACKING)
    with ExitStack() as stack:
        try:
            disk = stack.enter_context(small_disk.mounted(directory, size_bytes))
        except OSError as error:
            pytest.skip(f"this machine does not let a test mount a file system: {error}")
        yield disk
