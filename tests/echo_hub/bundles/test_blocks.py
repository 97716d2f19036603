from __future__ import annotations

import contextlib
from dataclasses import replace

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.bundles import blocks
from echo_hub.bundles.blocks import BlockWriter, BundledGroup, pack_block, unpack_block
from echo_shared.errors import CodecError
from echo_shared.records.rollout import DrawnSpan
from echo_shared.wire.messages import DropReason, ReceiptState
from tests.echo_hub.bundles.made import group, lease, payload_of

GROUPS = [
    group(
        3,
        lease(1, index=0, place=0, payload=payload_of(5, 6, 1, observed=(4, 4)), turn_reward=0.25, reward=None),
        lease(2, index=0, turn=1, place=1, reward=-0.5),
        lease(
            4,
            index=2,
            place=-1,
            state=ReceiptState.DROPPED,
            drop_reason=DropReason.EXPIRED,
            payload=None,
            reward=None,
            node="node-b",
        ),
        step=7,
        seed=2**64 - 1,
    ),
    group(9, lease(2**40, index=1023, payload=replace(payload_of(5, 6), spans=(
        DrawnSpan(node_id="node-c", policy_version=3, num_tokens=1),
        DrawnSpan(node_id="", policy_version=4, num_tokens=1),
    ))), step=None),
]  # fmt: skip


def same(one: list[BundledGroup], other: list[BundledGroup]) -> bool:
    return repr(one) == repr(other)


def test_a_block_is_read_as_it_was_written() -> None:
    assert same(unpack_block(pack_block(GROUPS)), GROUPS)
    assert unpack_block(pack_block(GROUPS))[0].rollouts[1].rollout_id == "2-0"


def test_large_groups_are_split_between_episodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "BLOCK_ROLLOUTS", 3)
    writer = BlockWriter()
    episodes = [lease(number, index=number // 2, turn=number % 2) for number in range(8)]
    written = [*writer.add(group(1, *episodes)), *writer.add(group(2, lease(20)))]
    written.append(writer.rest())
    assert writer.rest() == b""
    parts = [unpack_block(block) for block in written]
    assert [[(one.group_id, len(one.rollouts)) for one in part] for part in parts] == [[(1, 4)], [(1, 4)], [(2, 1)]]
    assert [one.lease_id for part in parts[:2] for each in part for one in each.rollouts] == list(range(8))


def packed(**columns: object) -> bytes:
    """Return a block whose columns are replaced by the given ones; the value None removes a column."""
    found = msgpack.unpackb(zstandard.decompress(pack_block(GROUPS)))
    found = {name: value for name, value in {**found, **columns}.items() if value is not None}
    return zstandard.compress(msgpack.packb(found))


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("token.id", b""),
        ("token.id", None),
        ("token.id", [1, 2]),
        ("token.logprob", np.full(10, np.nan, "<f4").tobytes()),
        ("rollout.tokens", np.array([2**31, 0, 0, 0], "<u4").tobytes()),
        ("rollout.tokens", b"abc"),
        ("rollout.index", np.array([0, 0, 1024, 0], "<u4").tobytes()),
        ("rollout.node", np.array([0, 0, 99, 0], "<u4").tobytes()),
        ("rollout.state", np.zeros(4, "<u4").tobytes()),
        ("rollout.reward", np.full(4, np.inf, "<f8").tobytes()),
        ("rollout.lease_id", np.full(4, -1, "<i8").tobytes()),
        ("span.tokens", np.zeros(4, "<u4").tobytes()),
        ("group.rollouts", np.array([4, 0], "<u4").tobytes()),
        ("group.prompt_tokens", np.array([6, 0], "<u4").tobytes()),
        ("group.step", np.array([-1, 1], "<i8").tobytes()),
        ("texts", b"\xff"),
        ("texts", b"x" * 999),
        ("more", b""),
    ],
)
def test_columns_that_do_not_fit_are_refused(column: str, value: object) -> None:
    with pytest.raises(CodecError, match="damaged"):
        unpack_block(packed(**{column: value}))


def test_a_block_that_grows_too_large_is_not_decompressed() -> None:
    bomb = zstandard.compress(bytes(blocks.BLOCK_BYTES + 1))
    assert len(bomb) < 10_000
    with pytest.raises(CodecError, match="it declares"):
        unpack_block(bomb)
    undeclared = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(2**20))
    with pytest.raises(CodecError, match="it declares"):
        unpack_block(undeclared)


@pytest.mark.parametrize("value", [{"a": {}}, {"a": [b""] * 9}, {"a": "text"}, {1: b""}, [b""], {"a" * 99: b""}])
def test_a_block_holds_nothing_but_columns_of_bytes(value: object) -> None:
    with pytest.raises(CodecError, match="damaged"):
        unpack_block(zstandard.compress(msgpack.packb(value)))


WHOLE = pack_block(GROUPS)


@given(st.integers(0, len(WHOLE) - 1), st.integers(1, 255))
def test_a_damaged_block_is_refused_or_unchanged(place: int, difference: int) -> None:
    """The block must be refused or have the same content: a zstd frame has a few bits without meaning."""
    damaged = bytearray(WHOLE)
    damaged[place] ^= difference
    try:
        found = unpack_block(bytes(damaged))
    except CodecError:
        return
    assert same(found, GROUPS)


@given(st.integers(0, len(WHOLE) - 1))
def test_a_truncated_block_is_refused(end: int) -> None:
    with pytest.raises(CodecError):
        unpack_block(WHOLE[:end])


PLAIN = zstandard.decompress(WHOLE)


@given(st.integers(0, len(PLAIN) - 1), st.integers(1, 255))
def test_changed_columns_are_read_or_refused(place: int, difference: int) -> None:
    content = bytearray(PLAIN)
    content[place] ^= difference
    with contextlib.suppress(CodecError):
        for group_read in unpack_block(zstandard.compress(bytes(content))):
            assert [len(episode) for episode in group_read.episodes()]
