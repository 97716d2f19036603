from __future__ import annotations

import pytest
import torch

from echo_shared.process.out_of_memory import ran_out


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("Tried to allocate 2.00 GiB."),
        MemoryError(),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("MPS backend out of memory (MPS allocated: 1.00 GB)"),
    ],
)
def test_errors_that_mean_too_little_memory(error: Exception) -> None:
    assert ran_out(error)


def test_a_refused_host_allocation_counts_as_out_of_memory() -> None:
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    assert ran_out(refused.value)


@pytest.mark.parametrize("error", [RuntimeError("CUDA error: device-side assert triggered"), OSError("out of memory")])
def test_other_errors(error: Exception) -> None:
    assert not ran_out(error)
