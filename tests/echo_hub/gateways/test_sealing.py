from __future__ import annotations

import pytest

from echo_hub.gateways.sealing import Seal, secret_of
from echo_shared.errors import CodecError
from echo_shared.signing.identity import Identity


def test_a_sealed_message_opens_only_with_its_key_and_subject() -> None:
    me = Identity.generate()
    message = Seal(me).close("a.b", ["x", 1, [b"\0frame", None]])
    assert Seal(me).open("a.b", message) == ["x", 1, [b"\0frame", None]]
    for seal, subject, said in (
        (Seal(Identity.generate()), "a.b", message),
        (Seal(me), "a.c", message),
        (Seal(me), "a.b", message[:-1]),
        (Seal(me), "a.b", message[:20] + b"?" + message[21:]),
        (Seal(me), "a.b", b""),
    ):
        with pytest.raises(CodecError):
            seal.open(subject, said)


def test_each_purpose_has_its_own_constant_secret() -> None:
    me = Identity.generate()
    assert secret_of(me, "nonces") == secret_of(me, "nonces") != secret_of(me, "messages")
