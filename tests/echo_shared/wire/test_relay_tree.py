from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_shared.errors import CodecError
from echo_shared.wire.relay_tree import NODE_BYTES, pack, pack_all, split

Shape = list[tuple[int, "Shape"]]
TREES = st.recursive(
    st.just([]),
    lambda below: st.lists(st.tuples(st.integers(0, 2**16 - 1), below), max_size=5),
    max_leaves=40,
)


def packed(shape: Shape) -> bytes:
    return pack((number, len(below), packed(below)) for number, below in shape)


def unpacked(way: bytes) -> Shape:
    return [(number, unpacked(below)) for number, below in split(way)]


def size(shape: Shape) -> int:
    return len(shape) + sum(size(below) for _, below in shape)


def test_the_example_at_the_modules_top() -> None:
    way = pack([(3, 0, b""), (9, 1, pack([(2, 0, b"")]))])
    assert way == bytes([3, 0, 0, 9, 0, 1, 2, 0, 0])
    assert split(way) == [(3, b""), (9, bytes([2, 0, 0]))]


@given(TREES)
def test_a_packed_tree_unpacks_and_takes_three_bytes_a_node(shape: Shape) -> None:
    assert unpacked(packed(shape)) == shape
    assert len(packed(shape)) == NODE_BYTES * size(shape)


def test_a_wide_node_and_a_deep_chain() -> None:
    wide: Shape = [(1, [(number, []) for number in range(255)])]
    assert unpacked(packed(wide)) == wide
    chain = b"".join(pack([(number, 1, b"")]) for number in range(5_000)) + pack([(0, 0, b"")])
    ((number, below),) = split(chain)
    assert number == 0 and len(below) == 5_000 * NODE_BYTES


@given(st.binary(max_size=60))
def test_any_bytes_are_split_or_refused(way: bytes) -> None:
    try:
        branches = split(way)
    except CodecError:
        return
    assert sum(NODE_BYTES + len(below) for _, below in branches) == len(way)


@pytest.mark.parametrize("way", [b"\0", b"\1\0", b"\1\0\1", b"\1\0\2\1\0\0", b"\1\0\0\1"])
def test_truncated_trees_are_refused(way: bytes) -> None:
    with pytest.raises(CodecError, match="cut off"):
        split(way)


def test_packing_a_whole_tree_equals_packing_each_branch() -> None:
    children = {7: [3, 9], 9: [2, 65_535], 65_535: [1]}
    below_9 = pack([(2, 0, b""), (65_535, 1, pack([(1, 0, b"")]))])
    assert pack_all(7, children) == pack([(3, 0, b""), (9, 2, below_9)])
    assert pack_all(9, children) == below_9
    assert pack_all(3, children) == b""
