from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable

import msgpack
import pytest

from benchmarks.fuzzing.targets import frame, text

TREE = {"type": "x", "n": 1, "list": [1, 2, {"a": b"data"}]}


def blind(data: bytes, most: int) -> bytes:
    return b"blind"[:most]


@pytest.mark.parametrize(
    ("change", "data", "read"),
    [(frame, msgpack.packb(TREE), msgpack.unpackb), (text, b'{"a": [1, "x", null]}', json.loads)],
)
def test_most_changes_keep_the_form_and_make_another_tree(
    change: Callable[..., bytes], data: bytes, read: Callable[..., object]
) -> None:
    changed = [change(data, 4_096, seed, blind) for seed in range(300)]
    kept = [one for one in changed if one != b"blind"]
    assert len(kept) > 200 and len(set(kept)) > 50
    assert changed == [change(data, 4_096, seed, blind) for seed in range(300)], "the seed determines the changes"
    for one in kept:
        read(one)


def test_data_without_structure_or_too_large_is_changed_blindly() -> None:
    assert {frame(b"\xc1", 100, seed, blind) for seed in range(20)} == {b"blind"}
    assert all(len(frame(msgpack.packb(TREE), 40, seed, blind)) <= 40 for seed in range(200))


def test_a_mutation_takes_bounded_memory() -> None:
    data = msgpack.packb([[[["x" * 200] * 4] * 4]])
    tracemalloc.start()
    for seed in range(2_000):
        frame(data, 4_096, seed, blind)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1_000 * len(data), "a change repeats a part at most 65 times"
