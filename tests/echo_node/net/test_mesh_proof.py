"""The proof of membership between two nodes, with both ends in memory; invalid proofs are rejected."""

import secrets

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.net.mesh_proof import Handshake, node_of
from echo_shared.errors import RemoteProtocolError
from echo_shared.signing.identity import Identity

KEY, OLD_KEY = secrets.token_bytes(32), secrets.token_bytes(32)
ALICE, BOB, EVE = Identity.generate(), Identity.generate(), Identity.generate()


def ends(key: bytes = KEY) -> tuple[Handshake, Handshake]:
    return Handshake(me=ALICE, run_key=key, role=b"connects"), Handshake(me=BOB, run_key=KEY, role=b"listens")


def test_both_prove_themselves() -> None:
    alice, bob = ends()
    bob.check(alice.hello, alice.proof(bob.hello))
    alice.check(bob.hello, bob.proof(alice.hello))
    assert (node_of(alice.hello), node_of(bob.hello)) == (ALICE.node_id, BOB.node_id)


def test_another_run_key_does_not_pass() -> None:
    alice, bob = ends(OLD_KEY)
    with pytest.raises(RemoteProtocolError, match="current key"):
        bob.check(alice.hello, alice.proof(bob.hello))
    with pytest.raises(RemoteProtocolError, match="current key"):
        alice.check(bob.hello, bob.proof(alice.hello))


def test_a_proof_is_of_no_use_a_second_time_or_turned_around() -> None:
    alice, bob = ends()
    proof = alice.proof(bob.hello)
    later = Handshake(me=BOB, run_key=KEY, role=b"listens")
    with pytest.raises(RemoteProtocolError):
        later.check(alice.hello, proof)
    with pytest.raises(RemoteProtocolError):
        alice.check(alice.hello, proof)
    mirror = Handshake(me=ALICE, run_key=KEY, role=b"listens", nonce=alice.nonce)
    with pytest.raises(RemoteProtocolError):
        alice.check(bob.hello, mirror.proof(bob.hello))


def test_a_member_cannot_impersonate_another() -> None:
    _, bob = ends()
    eve = Handshake(me=EVE, run_key=KEY, role=b"connects")
    pretended = eve.nonce + ALICE.public_key
    with pytest.raises(RemoteProtocolError):
        bob.check(pretended, eve.proof(bob.hello))
    said = bob._transcript(b"connects", pretended)
    with pytest.raises(RemoteProtocolError, match="signature does not match its key"):
        bob.check(pretended, bob._mac(said) + EVE.sign(said))


def test_the_run_key_is_not_shown() -> None:
    assert KEY.hex() not in repr(ends()[0]) and repr(KEY) not in repr(ends()[0])


@given(st.binary(max_size=200))
def test_noise_is_no_proof_and_no_hello(noise: bytes) -> None:
    alice, bob = ends()
    with pytest.raises(RemoteProtocolError):
        bob.check(alice.hello, noise)
    if len(noise) != 64:
        with pytest.raises(RemoteProtocolError, match="not a node's hello"):
            node_of(noise)
