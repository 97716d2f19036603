"""The seccomp filter that reports refused calls refuses the same calls as the filter that does not report."""

from __future__ import annotations

import errno

import pytest

from echo_shared.cage import seccomp, syscalls, tracing
from tests.echo_shared.cage.test_seccomp import ALLOW, ARCHITECTURES, PID, run

NOTIFY, ENOSYS = 0x7FC00000, 0x50000 | errno.ENOSYS


@pytest.mark.parametrize("processor", syscalls.PROCESSORS)
def test_the_filter_notifies_of_each_refusal_and_openat(processor: str) -> None:
    silent = seccomp.program(processor, PID, tcp=False, local="listening")
    openat = tracing._OPENAT[processor]
    notifying = tracing._watched(silent, openat)
    # These arguments let the driver open a socket, but the filter still refuses most other calls.
    arguments = (1, 5, 0)
    for number in range(600):
        before = run(silent, number, ARCHITECTURES[processor], *arguments)
        expected = before if before in (ALLOW, ENOSYS) else NOTIFY
        assert run(notifying, number, ARCHITECTURES[processor], *arguments) == (
            NOTIFY if number == openat else expected
        )
    assert run(silent, openat, ARCHITECTURES[processor]) == ALLOW


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"\x01\0/tmp/nvidia-mps/control\0\0", "'/tmp/nvidia-mps/control'"),
        (b"\x01\0\0cuda-uvmfd-1-2", "'@cuda-uvmfd-1-2'"),
        (b"\x02\0\x1f\x90\x7f\0\0\x01", "AF_INET"),
        (b"", ""),
    ],
)
def test_an_address_is_reported_in_words(raw: bytes, words: str) -> None:
    assert tracing._address(raw) == words
