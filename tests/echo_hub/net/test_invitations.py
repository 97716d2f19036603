from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from echo_hub.net import invitations as invitations_module
from echo_hub.net.invitations import Invitations, InviteEndedError, hash_of, new_token
from echo_shared.records.run import Invite

ADA = Invite(invite_id=1, name="Ada", token_hash=hash_of("ada"), max_keys=2, created_at=0.0, expires_at=10.0)
BOB = Invite(invite_id=2, name="Bob", token_hash=hash_of("bob"), max_keys=1, created_at=0.0, expires_at=20.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the clock of the invitations."""
    clock = SimpleNamespace(time=lambda: 5.0)
    monkeypatch.setattr(invitations_module, "time", clock)
    return clock


def test_tokens_are_long_and_no_two_are_alike() -> None:
    first, second = new_token(), new_token()
    assert first != second and len(first) >= 43
    assert hash_of("a\udcff") != hash_of("a"), "any string from a node has a hash"


def test_a_token_that_is_nobodys_is_no_invite() -> None:
    invitations = Invitations([ADA])
    assert [invitations.find("a", token) for token in (None, "", "Ada", ADA.token_hash)] == [None] * 4


def test_an_invite_is_for_a_number_of_keys() -> None:
    invitations = Invitations([ADA, BOB], {"old": 1})
    assert invitations.find("a", "ada") == 1
    invitations.take("a", 1)
    invitations.take("a", 1)
    with pytest.raises(InviteEndedError, match="for Ada is used up: 2 keys have"):
        invitations.find("b", "ada")
    with pytest.raises(InviteEndedError, match="used up"):
        invitations.take("b", 1)
    assert [invitations.find(key, token) for key in ("a", "old") for token in ("ada", None, "wrong")] == [1] * 6
    assert [invitations.has(key) for key in ("a", "old", "b")] == [True, True, False]


def test_an_expired_invite_admits_only_earlier_keys(clock: SimpleNamespace) -> None:
    invitations = Invitations([ADA])
    invitations.take("a", 1)
    clock.time = lambda: 10.0
    invitations.take("a", 1)
    assert invitations.find("a", "ada") == 1
    with pytest.raises(InviteEndedError, match="for Ada expired on"):
        invitations.find("b", "ada")


def test_a_revoked_invite_admits_no_key() -> None:
    invitations = Invitations([ADA], {"a": 1})
    invitations.renew([replace(ADA, revoked_at=4.0)])
    assert invitations.find("a", None) is None and invitations.find("a", "wrong") is None
    assert not invitations.has("a")
    for key in ("a", "b"):
        with pytest.raises(InviteEndedError, match="for Ada has been revoked"):
            invitations.find(key, "ada")
    with pytest.raises(InviteEndedError, match="revoked"):
        invitations.take("a", 1)


def test_a_key_that_comes_by_another_invite_leaves_its_place_in_the_first() -> None:
    invitations = Invitations([replace(ADA, max_keys=1), BOB], {"a": 1})
    assert invitations.find("a", "bob") == 2
    invitations.take("a", 2)
    assert (invitations.find("a", None), invitations.find("b", "ada")) == (2, 1)
    invitations.take("b", 1)
    assert invitations.find("b", "bob") == 1, "bob's invite is used up, but the key's own is not revoked"
