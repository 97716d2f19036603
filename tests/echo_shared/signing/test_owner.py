from __future__ import annotations

import base64

import pytest

from echo_shared.errors import ConfigError
from echo_shared.signing.identity import Identity
from echo_shared.signing.owner import claim, code_of, is_claimed, owner_of

HUB = bytes(32)


def test_a_code_brings_the_key_to_another_machine() -> None:
    owner = Identity.generate()
    code = code_of(owner)
    assert owner_of(f"  {code[:20]}\n{code[20:]} ").public_key == owner.public_key


@pytest.mark.parametrize("spoil", [lambda code: code[:-1], lambda code: code[1:], lambda code: "ä", lambda code: ""])
def test_a_damaged_code_is_refused(spoil: object) -> None:
    assert callable(spoil)
    with pytest.raises(ConfigError, match="not an owner's code"):
        owner_of(spoil(code_of(Identity.generate())))


def test_a_code_with_one_wrong_letter_is_refused() -> None:
    code = code_of(Identity.generate())
    wrong = code[:7] + ("A" if code[7] != "A" else "B") + code[8:]
    assert len(base64.urlsafe_b64decode(wrong)) == 36
    with pytest.raises(ConfigError, match="checksum"):
        owner_of(wrong)


def test_a_claim_holds_for_one_node_hub_and_owner() -> None:
    owner, other = Identity.generate(), Identity.generate()
    signed = claim(owner, node_id="a", hub_key=HUB)
    assert is_claimed(owner.public_key, signed, node_id="a", hub_key=HUB)
    assert not is_claimed(owner.public_key, signed, node_id="b", hub_key=HUB)
    assert not is_claimed(owner.public_key, signed, node_id="a", hub_key=bytes([1]) * 32)
    assert not is_claimed(other.public_key, signed, node_id="a", hub_key=HUB)
