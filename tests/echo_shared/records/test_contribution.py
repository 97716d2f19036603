from __future__ import annotations

import json
from typing import Any

import pytest

from echo_shared.errors import CodecError
from echo_shared.records.contribution import MOST_BYTES, PREFIX, Contribution, moment, sign, verified
from echo_shared.signing.identity import Identity, verify

HUB, NODE = Identity.generate(), Identity.generate()


def contribution(**changes: Any) -> Contribution:
    fields: dict[str, Any] = {
        "run_id": "run-1",
        "run_name": "Sums, größer",
        "hub_key": HUB.public_key.hex(),
        "node_id": NODE.node_id,
        "node_key": NODE.public_key.hex(),
        "node_name": 'a "node" <b>',
        "first_seen": moment(0.0),
        "last_seen": moment(86_399.9),
        "issued_at": moment(1e9),
        "trained_rollouts": 12,
        "trained_tokens": 3_456,
        "evaluated_rollouts": 2,
        "evaluated_tokens": 30,
        "checks_passed": 5,
        "checks_failed": 0,
        "others_checked_rollouts": 1,
        "others_checked_tokens": 17,
    }
    return Contribution(**{**fields, **changes})


def test_a_signed_certificate_is_read_unchanged() -> None:
    said = contribution()
    assert verified(sign(said, HUB)) == said
    assert (said.first_seen, said.last_seen) == ("1970-01-01T00:00:00Z", "1970-01-01T23:59:59Z")


def test_the_signed_bytes_are_these() -> None:
    """Other software verifies a certificate's signature over exactly these bytes, so they must not change."""
    document = json.loads(sign(contribution(), HUB))
    canonical = json.dumps(document["certificate"], sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    assert canonical.startswith(b'{"checks_failed":0,"checks_passed":5,') and "größer".encode() in canonical
    assert PREFIX == b"echo-swarm certificate of contribution 1\0"
    assert verify(HUB.public_key, bytes.fromhex(document["signature"]), PREFIX + canonical)


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("trained_tokens", 3_457),
        ("node_name", "another"),
        ("issued_at", moment(1e9 + 1)),
        ("hub_key", NODE.public_key.hex()),
    ],
    # Name the cases here: pytest would take the random keys as names, which differ in each test process.
    ids=["tokens", "name", "time", "key"],
)
def test_a_changed_certificate_is_refused(place: str, value: object) -> None:
    document = json.loads(sign(contribution(), HUB))
    document["certificate"][place] = value
    with pytest.raises(CodecError, match="signature is wrong"):
        verified(json.dumps(document).encode())


def test_the_form_does_not_matter_to_the_signature() -> None:
    document = json.loads(sign(contribution(), HUB))
    document["certificate"] = dict(reversed(document["certificate"].items()))
    assert verified(json.dumps(document).encode()) == contribution()


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"[]",
        b"\xff",
        b'{"certificate": {}, "signature": ""}',
        b" " * (MOST_BYTES + 1),
        json.dumps({**json.loads(sign(contribution(), HUB)), "more": 1}).encode(),
        sign(contribution(), HUB).replace(b'"trained_tokens": 3456', b'"trained_tokens": 3456.0'),
        sign(contribution(), HUB).replace(b"1970-01-01T00", b"1970-13-01T00"),
    ],
)
def test_other_content_is_refused_as_no_certificate(document: bytes) -> None:
    with pytest.raises(CodecError, match="no certificate"):
        verified(document)


def test_a_node_id_must_be_that_of_the_key() -> None:
    with pytest.raises(CodecError, match="does not belong to its node key"):
        verified(sign(contribution(node_id="ab" * 10), HUB))


def test_work_for_tenants_is_certified_and_changes_no_other_certificate() -> None:
    """Older releases refuse unknown fields, and have signed certificates without these two fields."""
    plain = json.loads(sign(contribution(), HUB))
    assert "answered_tokens" not in plain["certificate"]
    said = contribution(answered_rollouts=3, answered_tokens=40)
    assert verified(sign(said, HUB)).answered_tokens == 40
    forged = json.loads(sign(said, HUB))
    forged["certificate"]["answered_tokens"] = 41
    with pytest.raises(CodecError, match="signature is wrong"):
        verified(json.dumps(forged).encode())
