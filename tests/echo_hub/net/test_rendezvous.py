"""The rendezvous passes on only addresses that are a node's own, and only as many Meets as two honest nodes need."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echo_hub.net.gateway import NodeInfo
from echo_hub.net.rendezvous import ANSWER_S, PAIR_AGAIN_S, WANTED_PER_S_OF_NODE, Rendezvous
from echo_hub.net.sightings import UNKNOWN_PORT, Sightings
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import MAX_ADDRESSES, MAX_MESH, Meet, MeetWanted

NOW = 1_000.0
SIGHTINGS = Sightings(Identity.generate())
HOME, ELSEWHERE = "8.8.1.1", "8.8.2.2"
"""Public addresses of two homes."""
HERE = "127.0.0.1"


def node(node_id: str, host: str, *, punches: bool = True) -> NodeInfo:
    return NodeInfo(
        node_id=node_id,
        public_key=bytes(32),
        name=node_id,
        backend="torch",
        device="cpu",
        host=host,
        hub_host="hub.example",
        swarm_port=0,
        mesh_port=7000,
        punches=punches,
    )


A, B = node("a", HOME), node("b", ELSEWHERE)


def wanted(of: NodeInfo, peer: NodeInfo, *seen: tuple[str, int], now: float = NOW, **fields: Any) -> MeetWanted:
    said = tuple(SIGHTINGS.sign(of.node_id, host, port, now=now) for host, port in (seen or ((of.host, 50_000),)))
    return MeetWanted(node_id=peer.node_id, port=40_000, sightings=said, **fields)


@pytest.fixture
def rendezvous() -> Rendezvous:
    return Rendezvous(SIGHTINGS, now=NOW)


def ask(rendezvous: Rendezvous, of: NodeInfo = A, peer: NodeInfo = B, now: float = NOW, **fields: Any) -> Meet | None:
    return rendezvous.meet(of, wanted(of, peer, now=now, **fields), peer, now=now)


def test_two_nodes_are_told_each_others_addresses(rendezvous: Rendezvous) -> None:
    assert ask(rendezvous) == Meet(node_id="a", addresses=((HOME, 50_000),), answers=False)
    assert ask(rendezvous, B, A, answers=True) == Meet(node_id="b", addresses=((ELSEWHERE, 50_000),), answers=True)


def test_behind_a_proxy_the_router_is_taken_to_keep_the_port(rendezvous: Rendezvous) -> None:
    meet = rendezvous.meet(A, wanted(A, B, (HOME, UNKNOWN_PORT)), B, now=NOW)
    assert meet is not None and meet.addresses == ((HOME, 40_000),)


def test_addresses_that_the_hub_has_not_seen_are_dropped(rendezvous: Rendezvous) -> None:
    victim = SIGHTINGS.sign("c", "9.9.9.9", 50_000, now=NOW)
    forged = MeetWanted(node_id="b", port=40_000, sightings=(victim, "9.9.9.9 50000 9999999999 00"), local_hosts=())
    assert rendezvous.meet(A, forged, B, now=NOW) is None
    old = wanted(A, B)
    assert rendezvous.meet(A, old, B, now=NOW + 1_000) is None


@pytest.mark.parametrize(
    "host",
    [
        *("127.0.0.1", "0.0.0.0", "224.0.0.1", "169.254.1.1", "255.255.255.255", "10.0.0.1", "192.168.1.9", "hub"),
        *("::1", "::", "ff02::1", "fe80::1", "::ffff:127.0.0.1"),
    ],
)
def test_addresses_without_meaning_elsewhere_are_dropped(rendezvous: Rendezvous, host: str) -> None:
    assert rendezvous.meet(A, wanted(A, B, (host, 50_000)), B, now=NOW) is None


def test_ports_of_the_system_are_dropped(rendezvous: Rendezvous) -> None:
    assert rendezvous.meet(A, wanted(A, B, (HOME, 53)), B, now=NOW) is None


def test_private_addresses_are_for_nodes_behind_the_same_router(rendezvous: Rendezvous) -> None:
    local = ("192.168.1.2", "fd00::2")
    assert ask(rendezvous, local_hosts=local) == Meet(node_id="a", addresses=((HOME, 50_000),))
    brother = replace(B, host=HOME)
    meet = ask(rendezvous, peer=brother, now=NOW + 6, local_hosts=local)
    assert meet is not None
    assert meet.addresses == ((HOME, 50_000), ("192.168.1.2", 40_000), ("fd00::2", 40_000))
    for others in (("127.0.0.1", "9.9.9.9"), ("169.254.0.1", "hub")):
        rendezvous.forget("a")
        assert ask(rendezvous, peer=brother, now=NOW + 12, local_hosts=others) == Meet(
            node_id="a", addresses=((HOME, 50_000),)
        )


@pytest.mark.parametrize(
    ("host", "public", "passes"),
    [
        (HOME, True, True),
        ("10.0.0.9", False, True),
        ("10.0.0.9", True, False),
        ("100.64.0.9", True, False),
        *((HERE, is_it, False) for is_it in (True, False)),
    ],
)
def test_a_proxys_address_is_not_taken_for_a_router(host: str, public: bool, passes: bool) -> None:
    rendezvous = Rendezvous(SIGHTINGS, now=NOW, public=public)
    meet = ask(rendezvous, replace(A, host=host), replace(B, host=host), local_hosts=("192.168.1.2",))
    assert (meet is not None and ("192.168.1.2", 40_000) in meet.addresses) == passes


def test_in_a_private_network_the_seen_address_is_enough(rendezvous: Rendezvous) -> None:
    one, other = replace(A, host="192.168.1.2"), replace(B, host="192.168.1.3")
    meet = ask(rendezvous, one, other)
    assert meet is not None and meet.addresses == (("192.168.1.2", 50_000),)


def test_nodes_that_do_not_know_the_message_get_none(rendezvous: Rendezvous) -> None:
    assert ask(rendezvous, peer=replace(B, punches=False)) is None
    assert ask(rendezvous, replace(A, punches=False)) is None


def test_a_pair_cannot_be_asked_for_again_at_once(rendezvous: Rendezvous) -> None:
    assert ask(rendezvous) is not None
    assert ask(rendezvous, now=NOW + PAIR_AGAIN_S / 2) is None
    assert ask(rendezvous, now=NOW + PAIR_AGAIN_S) is not None


def test_only_a_meet_is_answered_and_only_once(rendezvous: Rendezvous) -> None:
    assert ask(rendezvous, B, A, answers=True) is None
    ask(rendezvous)
    assert ask(rendezvous, A, B, answers=True) is None, "its own"
    assert ask(rendezvous, B, A, answers=True) is not None
    assert ask(rendezvous, B, A, answers=True) is None
    ask(rendezvous, now=NOW + 20)
    assert ask(rendezvous, B, A, now=NOW + 20 + ANSWER_S, answers=True) is None


def test_one_node_cannot_ask_without_end(rendezvous: Rendezvous) -> None:
    peers = [node(f"n{number}", ELSEWHERE) for number in range(2_000)]
    sent = [ask(rendezvous, peer=peer) for peer in peers]
    passed = sum(meet is not None for meet in sent)
    assert 2 * MAX_MESH <= passed <= 8 * WANTED_PER_S_OF_NODE
    later = [ask(rendezvous, peer=peer, now=NOW + 1) for peer in peers[1_000:]]
    assert sum(meet is not None for meet in later) == WANTED_PER_S_OF_NODE


def test_what_is_kept_of_a_node_is_bounded_and_forgotten(rendezvous: Rendezvous) -> None:
    for second in range(0, 600, 2):
        ask(rendezvous, peer=node(f"n{second}", ELSEWHERE), now=NOW + second)
    assert len(rendezvous._asked["a"]) < 2 * WANTED_PER_S_OF_NODE * ANSWER_S
    rendezvous.forget("a")
    assert "a" not in rendezvous._asked
    meet = ask(rendezvous, now=NOW + 700)
    assert meet is not None and len(meet.addresses) <= MAX_ADDRESSES
