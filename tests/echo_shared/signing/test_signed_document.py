from __future__ import annotations

import json

import pytest

from echo_shared.errors import CodecError
from echo_shared.signing.identity import Identity, verify
from echo_shared.signing.signed_document import Signed, moment, sign, verified

HUB, OTHER = Identity.generate(), Identity.generate()
PREFIX = b"a kind of document 1\0"


class Said(Signed):
    number: int
    text: str


SAID = Said(hub_key=HUB.public_key.hex(), number=2**53, text='größer "<b>" \u202e')


def read(document: bytes, *, prefix: bytes = PREFIX, name: str = "said") -> Said:
    return verified(document, Said, name=name, prefix=prefix, what="document", most_bytes=1_000)


def signed() -> bytes:
    return sign(SAID, HUB, name="said", prefix=PREFIX)


def test_a_signed_document_is_read_in_any_json_layout() -> None:
    assert read(signed()) == SAID
    document = json.loads(signed())
    assert read(json.dumps({"signature": document["signature"], "said": document["said"]}).encode()) == SAID


def test_the_signed_bytes_are_the_prefix_and_the_sorted_fields() -> None:
    document = json.loads(signed())
    canonical = json.dumps(document["said"], sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert verify(HUB.public_key, bytes.fromhex(document["signature"]), PREFIX + canonical)


def test_another_kind_of_document_is_refused() -> None:
    with pytest.raises(CodecError, match="signature is wrong"):
        read(signed(), prefix=b"another kind 1\0")
    with pytest.raises(CodecError, match="no document"):
        read(signed(), name="other")


@pytest.mark.parametrize(
    ("field", "value"),
    [("number", 1), ("text", "x"), ("hub_key", OTHER.public_key.hex())],
    ids=["a number", "a text", "the key"],
)
def test_a_changed_document_is_refused(field: str, value: object) -> None:
    document = json.loads(signed())
    document["said"][field] = value
    with pytest.raises(CodecError, match="signature is wrong"):
        read(json.dumps(document).encode())


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"null",
        b"[" * 900,
        b'{"said": NaN, "signature": ""}',
        b'{"said": {}, "signature": ""}',
        signed().replace(b"9007199254740992", b"9007199254740992.0"),
        b" " * 1_001,
    ],
)
def test_other_content_is_refused_as_no_document(document: bytes) -> None:
    with pytest.raises(CodecError, match="no document"):
        read(document)


@pytest.mark.parametrize("signature", [7, None, "", "zz" * 64, "00" * 64])
def test_an_invalid_signature_is_refused(signature: object) -> None:
    document = {**json.loads(signed()), "signature": signature}
    with pytest.raises(CodecError, match="signature is wrong"):
        read(json.dumps(document).encode())


def test_moments_are_to_the_second() -> None:
    assert moment(1e9 + 0.9) == "2001-09-09T01:46:40Z"
