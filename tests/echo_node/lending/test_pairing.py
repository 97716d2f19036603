"""The code that pairs a node with a helper (a machine that lends memory or a GPU), and the helper's certificate: a
printed code is parsed back, anything else is refused.
"""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import given
from hypothesis import strategies as st

from echo_node.lending.pairing import DEFAULT_PORT, Code, HelperAddress, Pairing
from echo_shared.errors import ConfigError


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16))
def test_a_code_survives_its_text(fingerprint: bytes, secret: bytes) -> None:
    code = Code(fingerprint=fingerprint, secret=secret)
    assert Code.parse(str(code)) == code
    address = HelperAddress.parse(f"192.168.1.7:50052#{code}")
    assert address == HelperAddress(host="192.168.1.7", port=50_052, code=code)
    assert str(address) == "192.168.1.7:50052"
    assert HelperAddress.parse(address.with_code) == address


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("127.0.0.1:7", "127.0.0.1", 7),
        ("localhost", "localhost", DEFAULT_PORT),
        ("[::1]:7", "::1", 7),
        (" 127.0.0.1:7 ", "127.0.0.1", 7),
    ],
)
def test_this_machine_needs_no_code(text: str, host: str, port: int) -> None:
    address = HelperAddress.parse(text)
    assert address == HelperAddress(host=host, port=port, code=None)
    assert HelperAddress.parse(address.with_code) == address


@pytest.mark.parametrize(
    "text",
    ["", "#", "host:port", "host:70000", "127.0.0.1:1#", "127.0.0.1:1#abc", "127.0.0.1:1#ä", "a@b:1", "a/b", "::1"],
)
def test_invalid_addresses_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not the address of a helper"):
        HelperAddress.parse(text)


def test_another_machine_needs_a_code() -> None:
    with pytest.raises(ConfigError, match="its code is missing"):
        HelperAddress.parse("192.168.1.7:50052")


def test_a_pairing_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "data" / "lend.pem"
    made = Pairing.load_or_create(file)
    assert Pairing.load_or_create(file) == made
    assert Pairing.load_or_create(tmp_path / "other.pem").code != made.code
    if sys.platform != "win32":
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    certificate = x509.load_pem_x509_certificate(file.read_bytes()).public_bytes(Encoding.DER)
    assert made.code.is_of(certificate)
    assert not Pairing.load_or_create(tmp_path / "other.pem").code.is_of(certificate)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    file = tmp_path / "lend.pem"
    file.write_text("nothing")
    with pytest.raises(ConfigError, match="certificate cannot be read") as caught:
        Pairing.load_or_create(file)
    assert str(file) in str(caught.value)
