"""Replacement for `benchmarks.fuzzing.child` whose reader fails on every input except the empty one."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.fuzzing import child


def read(data: bytes) -> None:
    if data:
        raise ZeroDivisionError


if __name__ == "__main__":
    broken = replace(child.TARGETS["bencode"], read=read)
    vars(child)["TARGETS"] = {"bencode": broken}
    child.main()
