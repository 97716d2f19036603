from echo_shared.signing.identity import Identity, fingerprint, node_id, verify


def test_a_signature_is_right_for_its_key_and_data_only() -> None:
    me, other = Identity.generate(), Identity.generate()
    signature = me.sign(b"data")
    assert verify(me.public_key, signature, b"data")
    assert not verify(me.public_key, signature, b"date")
    assert not verify(other.public_key, signature, b"data")
    assert not verify(me.public_key, signature[:-1], b"data")
    assert not verify(b"short", signature, b"data")


def test_a_key_survives_as_pem() -> None:
    me = Identity.generate()
    assert Identity.from_pem(me.to_pem()).public_key == me.public_key


def test_names_of_a_key_never_change() -> None:
    key = bytes(range(32))
    assert node_id(key) == "dc7934f9924babfd1608"
    assert fingerprint(key) == "f39a 2cad 5841 1cd4 9f57 7e50 86b8 031f"
