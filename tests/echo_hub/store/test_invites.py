from __future__ import annotations

from dataclasses import replace

from echo_hub.store.invites import add_invite, read_came_by, read_invites, read_num_invites, revoke_invite
from echo_hub.store.known_nodes import read_banned_nodes
from echo_hub.store.reports import read_leaderboard
from echo_hub.store.store import Store
from echo_shared.records.run import Invite

ADA = Invite(name="Ada", token_hash="a" * 64, max_keys=2, created_at=1.0, expires_at=9.5)
BOB = Invite(name="Bob", token_hash="b" * 64, max_keys=1, created_at=2.0, expires_at=9.5)


def seen(store: Store, node_id: str, now: float, invite_id: int | None = None) -> None:
    store.node_seen(
        node_id=node_id,
        public_key=bytes(32),
        name="n",
        backend="torch",
        device="cpu",
        now=now,
        invite_id=invite_id,
    )


def test_an_invite_is_read_back_with_its_own_number(store: Store) -> None:
    store.write(add_invite, ADA)
    store.write(add_invite, BOB)
    assert store.read(read_invites) == [replace(ADA, invite_id=1), replace(BOB, invite_id=2)]


def test_a_name_is_taken_until_its_invite_is_revoked(store: Store) -> None:
    again = replace(ADA, token_hash="c" * 64)
    assert store.write(add_invite, ADA) and not store.write(add_invite, again)
    assert store.read(read_num_invites) == (1, 0)
    store.write(revoke_invite, "Ada", 5.0)
    assert store.read(read_num_invites) == (1, 1)
    assert store.write(add_invite, again)
    assert [(invite.token_hash[0], invite.revoked_at) for invite in store.read(read_invites)] == [
        ("a", 5.0),
        ("c", None),
    ]


def test_a_node_keeps_the_invite_that_it_joined_with(store: Store) -> None:
    store.write(add_invite, ADA)
    store.write(add_invite, BOB)
    seen(store, "stranger", 1.0)
    seen(store, "b", 2.0, invite_id=1)
    seen(store, "a", 3.0, invite_id=1)
    seen(store, "b", 4.0)
    assert list(store.read(read_came_by).items()) == [("b", 1), ("a", 1)]
    seen(store, "b", 5.0, invite_id=2)
    assert store.read(read_came_by) == {"b": 2, "a": 1}
    assert {node.node_id: node.invite for node in store.read(read_leaderboard)} == {
        "a": "Ada",
        "b": "Bob",
        "stranger": "",
    }


def test_a_revoked_invite_stays_listed_and_bans_its_nodes_on_request(store: Store) -> None:
    for invite in (ADA, BOB):
        store.write(add_invite, invite)
    for node_id, invite_id in (("a", 1), ("b", 2), ("stranger", None)):
        seen(store, node_id, 1.0, invite_id)
    assert store.write(revoke_invite, "Ada", 5.0) == ["a"] and store.read(read_banned_nodes) == frozenset()
    assert store.write(revoke_invite, "Ada", 6.0, ban=True) == ["a"] and store.read(read_banned_nodes) == {"a"}
    assert [invite.revoked_at for invite in store.read(read_invites)] == [5.0, None]
    assert store.write(revoke_invite, "nobody", 7.0, ban=True) == [] and store.read(read_banned_nodes) == {"a"}
