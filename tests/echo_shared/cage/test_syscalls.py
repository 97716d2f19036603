from __future__ import annotations

import re
from pathlib import Path

import pytest

from echo_shared.cage import syscalls

HEADERS = {
    "x86_64": Path("/usr/include/x86_64-linux-gnu/asm/unistd_64.h"),
    "aarch64": Path("/usr/include/asm-generic/unistd.h"),
}


@pytest.mark.parametrize("processor", syscalls.PROCESSORS)
def test_numbers_equal_the_headers(processor: str) -> None:
    """Calls that are newer than the installed headers are not compared."""
    if not HEADERS[processor].exists():
        pytest.skip("the kernel's headers are not installed")
    pattern = re.compile(r"^#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", re.MULTILINE)
    known = {name: int(number) for name, number in pattern.findall(HEADERS[processor].read_text())}
    numbers = syscalls.numbers(processor)
    assert {name: known[name] for name in numbers if name in known} == {
        name: number for name, number in numbers.items() if name in known
    }
    assert min((number for name, number in numbers.items() if name not in known), default=1_000) > 450
    assert len(set(numbers.values())) == len(numbers)
    assert not {name for name in known if re.match("(sys_)?(exec|fork|vfork|clone)", name)} - numbers.keys()
