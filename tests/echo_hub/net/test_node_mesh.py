"""The hub's view of the links between nodes: who is told of whom, and which two nodes may meet."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from echo_hub.net.broadcaster import Broadcaster
from echo_hub.net.node_mesh import NodeMesh
from echo_hub.net.rendezvous import Rendezvous
from echo_hub.net.sightings import Sightings
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import FromHub, Links, Meet, MeetWanted, Mesh
from tests.echo_hub.net.test_rendezvous import A, B, node

SIGHTINGS = Sightings(Identity.generate())
C = node("c", "8.8.3.3")


class Told:
    """Records the messages to the nodes."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, FromHub]] = []

    def send(self, node_id: str, message: FromHub) -> bool:
        self.sent.append((node_id, message))
        return True

    def push(self, node_id: str, message: object, rank: object) -> bool:
        raise AssertionError("nothing is pushed")


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def mesh(told: Told) -> NodeMesh:
    mesh = NodeMesh(
        degree=8,
        connections=told,
        broadcaster=Broadcaster(told),
        rendezvous=Rendezvous(SIGHTINGS, now=time.time()),
    )
    mesh.join(A)
    mesh.join(B)
    return mesh


def wanted(peer: str, *, by: str = "a", host: str = A.host) -> MeetWanted:
    return MeetWanted(
        node_id=peer, port=40_000, sightings=(SIGHTINGS.sign(by, host, 50_000, now=time.time()),), answers=False
    )


def test_a_peer_hears_of_a_node_before_it_is_to_meet_it(mesh: NodeMesh, told: Told) -> None:
    """Node b joined last, and node a lacks the news: without the Mesh, node a would ignore the Meet."""
    mesh.meet("b", wanted("a", by="b", host=B.host))
    mesh.meet("b", wanted("a", by="b", host=B.host))
    (to, first), (_, second) = told.sent
    assert to == "a" and isinstance(first, Mesh) and [peer.node_id for peer in first.peers] == ["b"]
    assert second == Meet(node_id="b", addresses=((B.host, 50_000),))


def test_only_nodes_that_the_hub_links_meet(mesh: NodeMesh, told: Told) -> None:
    mesh.exclude("b")
    mesh.meet("a", wanted("b"))
    mesh.meet("a", wanted("nobody"))
    mesh.meet("a", wanted("a"))
    mesh.meet("nobody", wanted("a"))
    assert told.sent == []


def test_a_hub_without_rendezvous_lets_no_nodes_meet(told: Told) -> None:
    mesh = NodeMesh(degree=8, connections=told, broadcaster=Broadcaster(told), rendezvous=None)
    mesh.join(A)
    mesh.join(B)
    mesh.meet("a", wanted("b"))
    mesh.leave("a")
    assert told.sent == []


def test_a_node_that_comes_again_may_meet_at_once(mesh: NodeMesh, told: Told) -> None:
    for _ in range(2):
        mesh.meet("a", wanted("b"))
        mesh.leave("a")
        mesh.join(A)
    assert sum(isinstance(message, Meet) for _, message in told.sent) == 2


def test_a_link_counts_if_both_ends_report_it(mesh: NodeMesh) -> None:
    mesh.join(C)
    mesh.said("a", Links(node_ids=("b", "c", "d")))
    mesh.said("b", Links(node_ids=("a",), punched=("a",)))
    mesh.said("c", Links(node_ids=("b",)))
    assert sorted(mesh.ends_among(["a", "b", "c"])) == [("a", "b"), ("b", "a")]
    assert mesh.ends_among(["a", "c"]) == []
    mesh.leave("b")
    assert mesh.ends_among(["a", "b", "c"]) == []


def test_nodes_are_told_of_changed_peers_only(mesh: NodeMesh, told: Told) -> None:
    nodes = {"a": A, "b": B}
    mesh.tell(nodes)
    assert [to for to, _ in told.sent] == ["a"]
    mesh.tell(nodes)
    mesh.leave("b")
    mesh.join(replace(B, mesh_port=7001))
    mesh.tell(nodes)
    assert [to for to, _ in told.sent] == ["a", "a"]
