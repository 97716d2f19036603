from __future__ import annotations

import mmap
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from echo_shared.process import process_memory

HOARD_BYTES = 128 * 2**20


def test_allocated_memory_counts_and_mapped_files_do_not(tmp_path: Path) -> None:
    file = tmp_path / "model"
    file.write_bytes(bytes(HOARD_BYTES))
    before = process_memory.own_bytes(os.getpid())
    with file.open("rb") as model, mmap.mmap(model.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert mapped.find(b"x") == -1  # Searching for an absent byte reads every page into memory.
        assert process_memory.own_bytes(os.getpid()) - before < HOARD_BYTES / 4
    hoard = bytearray(os.urandom(2**20) * (HOARD_BYTES // 2**20))
    assert process_memory.own_bytes(os.getpid()) - before > HOARD_BYTES * 3 / 4
    assert len(hoard) == HOARD_BYTES


def test_a_process_that_is_gone_holds_nothing() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    assert process_memory.own_bytes(gone.pid) == 0


def test_free_memory_is_more_than_zero_and_less_than_the_total() -> None:
    assert 0 < process_memory.left_bytes() < psutil.virtual_memory().total


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's killer")
def test_the_kernel_would_kill_a_volunteer_process_first() -> None:
    score = "print(open('/proc/self/oom_score').read())"
    offers = "from echo_shared.process.process_memory import go_first; go_first(); "
    plain, offered = (
        int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        for code in (score, offers + score)
    )
    assert offered > plain


def test_the_kernels_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "linux":
        assert process_memory.kernel_kills() is not None
    counts = tmp_path / "vmstat"
    for text, expected in (("nr_free 12\noom_kill 3\n", 3), ("nr_free 12\n", None), ("?", None)):
        counts.write_text(text)
        monkeypatch.setattr(process_memory, "_KERNEL_COUNTS", counts)
        assert process_memory.kernel_kills() == expected
