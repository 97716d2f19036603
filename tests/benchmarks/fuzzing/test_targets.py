"""Every function that the fuzzer tests accepts valid input. It refuses invalid input of the stored corpus, and random
bytes, without a crash.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.fuzz import CORPUS
from benchmarks.fuzzing.targets import TARGETS, Target, run
from echo_shared.errors import CodecError


@pytest.mark.parametrize("name", TARGETS)
def test_examples_are_valid_and_no_kept_input_is_a_finding(name: str) -> None:
    target = TARGETS[name]
    for example in target.examples():
        assert run(target, example) and len(example) <= target.most_bytes
        run(target, example[:-1])
        run(target, example[: len(example) // 2])
    kept = sorted((CORPUS / name.replace(" ", "-")).glob("*"))
    assert kept, "each target has a corpus"
    for file in kept:
        run(target, file.read_bytes())


@given(name=st.sampled_from(sorted(TARGETS)), data=st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(name: str, data: bytes) -> None:
    run(TARGETS[name], data)


def test_any_other_exception_is_a_finding() -> None:
    def refuses(_data: bytes) -> None:
        raise CodecError("No.")

    assert not run(Target(read=refuses, examples=list), b"")
    assert run(Target(read=len, examples=list), b"")
    with pytest.raises(ZeroDivisionError):
        run(Target(read=lambda data: 1 // len(data), examples=list), b"")
