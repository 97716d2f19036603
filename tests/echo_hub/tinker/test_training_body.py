"""Bodies of forward_backward: as the tinker SDK encodes them, and in forms that an attacker would send."""

import contextlib
import json
import subprocess
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import LossFunction
from echo_hub.tinker.protobuf import put_bytes, put_number
from echo_hub.tinker.training_body import MOST_DATA, MOST_PIECES, read_head, read_request
from tests.doors import doors_python

SDK = Path(__file__).with_name("sdk_messages.py")


@pytest.fixture(scope="module")
def bodies() -> dict[str, bytes]:
    answer = subprocess.run([doors_python(), SDK, "encode"], check=True, capture_output=True)
    return {name: bytes.fromhex(body) for name, body in json.loads(answer.stdout).items()}


def tensor(*, dtype: int = 1, dense: bytes = b"", shape: tuple[int, ...] = (), csr: tuple[bytes, ...] = ()) -> bytes:
    out = bytearray()
    if csr:
        inner = bytearray()
        for number, part in enumerate(csr, 1):
            put_bytes(inner, number, part)
        put_bytes(out, 2, inner)
    else:
        put_bytes(out, 1, dense)
    put_number(out, 3, dtype)
    for size in shape:
        put_number(out, 4, size)
    return bytes(out)


def datum(tokens: bytes = b"\1\0\0\0", **inputs: bytes) -> bytes:
    text, chunk, out = bytearray(), bytearray(), bytearray()
    put_bytes(text, 1, tokens)
    put_bytes(chunk, 1, text)
    put_bytes(out, 1, chunk)
    for name, value in inputs.items():
        entry = bytearray()
        put_bytes(entry, 1, name.encode())
        put_bytes(entry, 2, value)
        put_bytes(out, 2, entry)
    return bytes(out)


def request(*data: bytes, loss: str = "cross_entropy") -> bytes:
    out = bytearray()
    put_bytes(out, 1, b"s-1:train:0")
    put_number(out, 2, 1)
    for one in data:
        put_bytes(out, 3, one)
    put_bytes(out, 4, loss.encode())
    return bytes(out)


def refusal_of(body: bytes) -> Refusal:
    with pytest.raises(Refusal) as caught:
        read_request(body)
    return caught.value


def int64(*numbers: int) -> bytes:
    return np.array(numbers, "<i8").tobytes()


def float32(*numbers: float) -> bytes:
    return np.array(numbers, "<f4").tobytes()


def test_the_sdk_s_own_bodies_are_read(bodies):
    head = read_head(bodies["plain"])
    assert (head.model_id, head.seq_id, head.forward_only) == ("s-1:train:0", 3, False)
    (one,) = read_request(bodies["plain"]).data
    assert one.input_ids.tolist() == [1, 2, 3, 150_000]
    assert one.loss_inputs["target_tokens"].tolist() == [2, 3, 4, 5]
    assert one.loss_inputs["weights"].tolist() == [0.0, 1.0, 1.0, -0.5]
    assert (one.loss_inputs["target_tokens"].dtype, one.loss_inputs["weights"].dtype) == (np.int64, np.float32)


def test_the_sdk_s_sparse_tensors_become_dense(bodies):
    (one,) = read_request(bodies["sparse"]).data
    weights, targets = one.loss_inputs["weights"], one.loss_inputs["target_tokens"]
    assert weights.shape == targets.shape == (4, 20)
    assert (weights[1, 3], weights[3, 7], np.abs(weights).sum()) == (0.5, -2.0, 2.5)
    assert (targets[1, 3], targets[3, 7], targets.sum()) == (11, 12, 23)


def test_the_sdk_s_spans_options_and_top_k_are_read(bodies):
    asked = read_request(bodies["spans"])
    (span,) = asked.data[0].spans
    assert (span.sequence_id, span.offset, span.start, span.length) == ("q", 0, 1, 3)
    assert asked.loss is LossFunction.PPO
    assert asked.config == {"clip_low_threshold": 0.9, "name": "text"}
    assert read_head(bodies["spans"]).seq_id == 2**31 - 1
    first, second = read_request(bodies["top_k"]).data
    assert first.loss_inputs["target_tokens"].tolist() == [[3, 4, 5], [6, 7, 8]]
    assert second.loss_inputs["weights"].shape == (4,)


@pytest.mark.parametrize(("name", "param"), [("image", "model_input"), ("stable_reinforce", "loss_fn")])
def test_what_is_not_offered_is_refused_by_its_name(bodies, name, param):
    refusal = refusal_of(bodies[name])
    assert (refusal.kind, refusal.param) == (RefusalKind.INVALID, param)
    assert name in refusal.what


@pytest.mark.parametrize(
    ("inputs", "named"),
    [
        ({"mask": tensor(dense=float32(1))}, "mask"),
        ({"weights": tensor(dense=float32(1, 2))}, "weights"),
        ({"weights": tensor(dense=float32(1), shape=(1, 2))}, "weights"),
        ({"weights": tensor(dense=float32(float("nan")))}, "weights"),
        ({"weights": tensor(dense=b"123")}, "weights"),
        ({"weights": tensor(dtype=9, dense=float32(1))}, "weights"),
        ({"weights": tensor(dense=float32(1), shape=(1, 1, 1))}, "weights"),
        ({"weights": tensor(dense=float32(1), shape=(2**63 - 1,))}, "weights"),
        ({"target_tokens": tensor(dense=float32(1))}, "target_tokens"),
        ({"target_tokens": tensor(dtype=2, dense=int64(-1))}, "target_tokens"),
        ({"weights": tensor(shape=(1, 4), csr=(float32(1), int64(0, 1), int64(4)))}, "weights"),
        ({"weights": tensor(shape=(1, 4), csr=(float32(1), int64(0, 1), int64(-1)))}, "weights"),
        ({"weights": tensor(shape=(1, 4), csr=(float32(1), int64(0, 2), int64(1)))}, "weights"),
        ({"weights": tensor(shape=(1, 4), csr=(float32(1, 1), int64(0, 2), int64(1, 1)))}, "weights"),
        ({"weights": tensor(shape=(1, 2**40), csr=(float32(1), int64(0, 1), int64(1)))}, "weights"),
        ({"weights": tensor(shape=(2**40, 4), csr=(float32(1), int64(0, 1), int64(1)))}, "weights"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_its_name(inputs, named):
    refusal = refusal_of(request(datum(**inputs)))
    assert refusal.kind is RefusalKind.INVALID
    assert named in refusal.what


def test_sparse_tensors_of_one_request_are_limited_together():
    rows = 1_000
    csr = (b"", int64(*[0] * (rows + 1)), b"")
    one = datum(b"\1\0\0\0" * rows, weights=tensor(shape=(rows, 4_096), csr=csr))
    refusal = refusal_of(request(*[one] * 5))
    assert refusal.kind is RefusalKind.TOO_LARGE
    assert "data[4].loss_fn_inputs[weights]" in refusal.what


@pytest.mark.parametrize("damaged", [b"\x1a\xff\xff\xff\xff\x0f", b"\x1b", b"\x00\x01", b"\x18\x80", b"\x52\x00"])
def test_malformed_bytes_are_refused(damaged):
    assert refusal_of(request(datum()) + damaged).kind is RefusalKind.INVALID


def test_too_many_chunks_are_refused():
    body = request(b"\x0a\x00" * (MOST_PIECES + 1))
    assert refusal_of(body).kind is RefusalKind.TOO_LARGE


@pytest.mark.parametrize("field", [b"\x30\x00", b"\x2a\x00", b"\x3a\x00", b"\x1a\x00", b"\x50\x00"])
def test_a_flood_of_short_fields_is_refused_soon(field):
    body = request(datum()) + field * 1_000_000
    started = time.process_time()
    with contextlib.suppress(Refusal):
        assert read_head(body).seq_id == 1
    refusal_of(body)
    assert time.process_time() - started < 0.5  # Decoding all fields would take several seconds.


@pytest.mark.parametrize(
    "one",
    [
        datum(weights=tensor(dense=float32(1)) + b"\x18\x01\x18\x01"),
        b"\x0a\x04\x0a\x00\x0a\x00" + datum(),
        datum() + b"\x1a\x06\x12\x04\x10\x00\x10\x00",
    ],
)
def test_a_field_that_may_come_once_is_refused_the_second_time(one):
    assert "more than once" in str(refusal_of(request(one)))


def test_too_many_data_are_refused():
    assert refusal_of(request(*[datum()] * (MOST_DATA + 1))).kind is RefusalKind.TOO_LARGE


@pytest.mark.parametrize("piece", [b"\x0a\x00", b"\x1a\x00", b"\x22\x00", b"\x0a\x02\x0a\x00"])
def test_hostile_pieces_need_little_memory(piece):
    body = request(piece * (100_000 // len(piece)))
    tracemalloc.start()
    assert refusal_of(body).kind is RefusalKind.INVALID
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 * len(body)  # At most MOST_PIECES objects of 100 bytes, however long the body is.


@given(st.binary(max_size=200), st.integers(0, 400))
def test_damaged_bodies_are_read_or_refused(noise, at):
    body = bytearray(request(datum(weights=tensor(dense=float32(1), shape=(1,)))))
    body[at : at + len(noise)] = noise
    for read in (read_head, read_request):
        try:
            read(bytes(body))
        except Refusal as refusal:
            assert refusal.kind in (RefusalKind.INVALID, RefusalKind.TOO_LARGE)
