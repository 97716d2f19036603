"""The precision chosen for this processor, and for one without fast 16-bit instructions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from echo_shared.sampling.torch_precision import multiplies, time_over_float32

CPU = torch.device("cpu")
CPUINFO = Path("/proc/cpuinfo")
FLAGS = CPUINFO.read_text().split() if CPUINFO.exists() else []
AVX2_ALONE = {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""Make PyTorch compute as on a processor without instructions beyond AVX2."""
SCRIPT = """
import time, torch
from echo_shared.sampling.torch_precision import multiplies
began = time.perf_counter()
print([multiplies(torch.device("cpu"), dtype) for dtype in (torch.bfloat16, torch.float16)])
print(time.perf_counter() - began)
"""


@pytest.mark.skipif(not {"avx512_bf16", "amx_bf16"} & {*FLAGS}, reason="this processor does not multiply bfloat16")
def test_a_processor_with_bfloat16_multiplies_it() -> None:
    assert multiplies(CPU, torch.bfloat16)


@pytest.mark.skipif("avx2" not in FLAGS, reason="this processor has no AVX2")
def test_a_processor_with_avx2_alone_multiplies_neither_and_says_so_soon() -> None:
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, **AVX2_ALONE}, capture_output=True, text=True, check=True
    )
    found, seconds = run.stdout.splitlines()
    assert found == "[False, False]"
    assert float(seconds) < 10


def test_of_other_devices_nothing_is_assumed() -> None:
    assert not multiplies(torch.device("meta"), torch.bfloat16)


def test_float32_takes_as_long_as_itself_and_all_threads_are_back() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        assert 0.5 < time_over_float32(torch.float32) < 2
        assert torch.get_num_threads() == threads + 1
    finally:
        torch.set_num_threads(threads)
