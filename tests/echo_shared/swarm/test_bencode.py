import libtorrent as lt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_shared.errors import CodecError
from echo_shared.swarm import bencode

values = st.recursive(
    st.integers(-(2**62), 2**62) | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=20,
)


@given(values)
def test_encoded_values_decode_unchanged(value: bencode.Value) -> None:
    assert bencode.decode(bencode.encode(value)) == value


def test_the_encoding_equals_libtorrents() -> None:
    value = {"b": [1, -2, b"\xff"], "a": {"x": 0}, "": b""}
    assert bencode.encode(value) == lt.bencode({k.encode(): v for k, v in value.items()})


@given(st.binary(max_size=60))
def test_hostile_bytes_are_a_codec_error_or_canonical(data: bytes) -> None:
    try:
        value = bencode.decode(data)
    except CodecError:
        return
    assert bencode.encode(value) == data


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"i1",
        b"i01e",
        b"i-0e",
        b"i e",
        b"i" + b"9" * 5000 + b"e",
        b"3:ab",
        b"-1:",
        b"01:a",
        b"99999999999999999999999:a",
        b"l",
        b"d1:a",
        b"d1:bi1e1:ai1ee",
        b"d1:ai1e1:ai2ee",
        b"di1ei2ee",
        b"d1:\xffi1ee",
        b"i1ei2e",
        b"l" * 100_000,
    ],
)
def test_refuses(data: bytes) -> None:
    with pytest.raises(CodecError):
        bencode.decode(data)
