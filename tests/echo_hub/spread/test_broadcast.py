from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_hub.spread.broadcast import LATE_S, Broadcast, SendPiece
from echo_hub.spread.neighbours import Neighbours
from echo_hub.spread.windows import BroadcastPaths
from echo_shared.wire.relay_tree import pack
from tests.echo_hub.core.access_links import MBIT, Host, Network, bound_s, fleet

MB = 1_000_000
KIB = 1024


def linked(paths: BroadcastPaths, *node_ids: str) -> None:
    for node_id in node_ids:
        paths.set_links(node_id, [other for other in node_ids if other != node_id])


def to(*numbers: int) -> bytes:
    return pack((number, 0, b"") for number in numbers)


def started(*node_ids: str, num_pieces: int = 100) -> Broadcast:
    paths = BroadcastPaths()
    linked(paths, *node_ids)
    broadcast = Broadcast(paths=paths, num_pieces=num_pieces, piece_bytes=32 * KIB)
    for node_id in node_ids:
        broadcast.join(node_id, hand_on=True, now=0.0)
    return broadcast


@pytest.mark.parametrize("leaves", [False, True])
def test_the_example_at_the_modules_top(leaves: bool) -> None:
    paths = BroadcastPaths()
    linked(paths, "a", "b")
    broadcast = Broadcast(paths=paths, num_pieces=4, piece_bytes=32 * KIB)
    for node_id in "abc":
        broadcast.join(node_id, hand_on=True, now=0.0)
    assert broadcast.plan(0.0) == [
        *[SendPiece(node_id="ab"[piece % 2], piece=piece, hand_on=to(1 - piece % 2)) for piece in range(4)],
        *[SendPiece(node_id="c", piece=piece) for piece in range(4)],
    ]
    if leaves:
        broadcast.leave("a", 0.1)
        assert broadcast.plan(0.1) == [SendPiece(node_id="b", piece=piece) for piece in (0, 2)]
    for node_id in "abc":
        broadcast.have(node_id, range(4), 0.2)
    assert broadcast.plan(0.2) == [] and broadcast.done


@pytest.mark.parametrize(
    ("hub_mbit", "up_mbit", "size", "delay_s", "worst"),
    [
        (100, 40, 8 * MB, 0.001, 1.25),
        (100, 20, 8 * MB, 0.001, 1.2),
        (20, 40, 8 * MB, 0.001, 1.1),
        (20, 20, 8 * MB, 0.001, 1.15),
        (100, 40, 8 * MB, 0.025, 1.6),
        (100, 20, 8 * MB, 0.025, 1.3),
        (20, 20, 8 * MB, 0.025, 1.2),
        (100, 40, 32 * MB, 0.01, 1.1),
        (20, 20, 32 * MB, 0.01, 1.05),
    ],
)
def test_every_node_has_the_version_close_to_the_bound(
    hub_mbit: float, up_mbit: float, size: int, delay_s: float, worst: float
) -> None:
    hosts = fleet(hub_mbit=hub_mbit, nodes=8, up_mbit=up_mbit, delay_s=delay_s)
    network = Network(hosts, size=size, piece_bytes=32 * KIB)
    assert network.run() <= worst * bound_s(hosts, size)
    assert network.broadcast.done


@pytest.mark.parametrize("hub_mbit", [20, 100])
@pytest.mark.parametrize("up_mbit", [20, 40])
def test_a_small_payload_takes_little_more_than_the_bound(hub_mbit: float, up_mbit: float) -> None:
    hosts = fleet(hub_mbit=hub_mbit, nodes=8, up_mbit=up_mbit, delay_s=0.01)
    assert Network(hosts, size=MB // 2, piece_bytes=16 * KIB).run() <= bound_s(hosts, MB // 2) + 0.2


def test_time_hardly_grows_with_the_fleet() -> None:
    took = [
        Network(fleet(hub_mbit=100, nodes=nodes, up_mbit=40), size=16 * MB, piece_bytes=32 * KIB).run()
        for nodes in (4, 16)
    ]
    assert took[1] <= 1.5 * took[0]


def test_measured_uplinks_are_used_for_the_next_version() -> None:
    hosts = fleet(hub_mbit=100, nodes=8, up_mbit=40, delay_s=0.025)
    first = Network(hosts, size=8 * MB, piece_bytes=32 * KIB)
    first_s = first.run()
    assert Network(hosts, size=8 * MB, piece_bytes=32 * KIB, after=first).run() <= first_s


@pytest.mark.parametrize(("nodes", "most_s"), [(8, 0.35), (16, 0.4)])
def test_small_versions_one_after_the_other_stay_quick(nodes: int, most_s: float) -> None:
    """Small versions occupy an uplink too briefly to be measured. Every owner (a node that relays a piece) must still
    get its share of pieces.
    """
    hosts = fleet(hub_mbit=20, nodes=nodes, up_mbit=20)
    before: Network | None = None
    for _ in range(6):
        before = Network(hosts, size=MB // 2, piece_bytes=16 * KIB, after=before)
        assert before.run() <= most_s


def test_late_pieces_come_from_the_hub_once_it_is_idle() -> None:
    hosts = fleet(hub_mbit=100, nodes=8, up_mbit=40)
    first = Network(hosts, size=2 * MB, piece_bytes=32 * KIB)
    undisturbed = first.run()
    hosts[5].up = MBIT
    assert Network(hosts, size=2 * MB, piece_bytes=32 * KIB, after=first).run() <= 2 * undisturbed


@pytest.mark.parametrize(("nodes", "piece_kib"), [(3, 64), (4, 32), (6, 64), (9, 32)])
def test_one_slow_node_delays_no_other_node_in_the_first_broadcast(nodes: int, piece_kib: int) -> None:
    hosts, size = fleet(hub_mbit=20, nodes=nodes, up_mbit=20), 4 * MB
    hosts[nodes].down = hosts[nodes].up = 4 * MBIT
    network = Network(hosts, size=size, piece_bytes=piece_kib * KIB)
    network.run()
    assert network.took_s(range(1, nodes)) <= 1.4 * size / hosts[0].up


def test_a_piece_that_came_another_way_is_useless() -> None:
    broadcast = started("a", "b", "c", num_pieces=2)
    first, second = broadcast.plan(0.0)[:2]
    assert (broadcast.left_of(first), broadcast.left_of(second)) == (first, second)
    broadcast.have(first.node_id, [first.piece], 0.1)
    assert broadcast.left_of(first) == first  # Others still wait for this piece from its owner (relaying node).
    for node_id in {"a", "b", "c"} - {first.node_id}:
        broadcast.have(node_id, [first.piece], 0.1)
    assert (broadcast.left_of(first), broadcast.left_of(second)) == (None, second)
    for node_id in {"a", "b", "c"} - {second.node_id}:
        broadcast.have(node_id, [second.piece], 0.2)
    assert broadcast.left_of(second) == SendPiece(node_id=second.node_id, piece=second.piece)
    broadcast.leave(second.node_id, 0.3)
    assert broadcast.left_of(second) is None


def test_without_links_the_hub_sends_everything() -> None:
    hosts = fleet(hub_mbit=50, nodes=4, up_mbit=20)
    for host in hosts:
        host.links = set()
    network = Network(hosts, size=4 * MB, piece_bytes=32 * KIB)
    assert network.run() <= 1.1 * 4 * 4 * MB / hosts[0].up
    assert network.directs == 4 * network.num_pieces and network.duplicates == 0


def test_two_groups_that_cannot_reach_each_other_cost_the_hub_two_copies() -> None:
    hosts = fleet(hub_mbit=20, nodes=8, up_mbit=40)
    for number, host in enumerate(hosts):
        host.links = {n for n in range(1, 9) if n % 2 == number % 2}
    network = Network(hosts, size=4 * MB, piece_bytes=32 * KIB)
    assert network.run() <= 1.25 * 2 * 4 * MB / hosts[0].up


def test_one_very_slow_node_delays_no_other_node() -> None:
    hosts = fleet(hub_mbit=100, nodes=8, up_mbit=40)
    undisturbed = Network(hosts, size=8 * MB, piece_bytes=32 * KIB).run()
    hosts[3].down = hosts[3].up = 2 * MBIT
    network = Network(hosts, size=8 * MB, piece_bytes=32 * KIB)
    network.run()
    assert network.took_s(set(range(1, 9)) - {3}) <= 1.5 * undisturbed
    assert len(network.got[3]) == network.num_pieces


def test_nodes_relay_as_much_as_their_uplinks_can() -> None:
    hosts = fleet(hub_mbit=20, nodes=6, up_mbit=40)
    for host in hosts[4:]:
        host.up = 5 * MBIT
    network = Network(hosts, size=8 * MB, piece_bytes=32 * KIB)
    assert network.run() <= 1.35 * bound_s(hosts, 8 * MB)


def test_a_node_that_dies_is_made_up_for() -> None:
    hosts = fleet(hub_mbit=100, nodes=8, up_mbit=40)
    undisturbed = Network(hosts, size=8 * MB, piece_bytes=32 * KIB).run()
    hosts[2].dies_at = hosts[5].dies_at = 0.5
    network = Network(hosts, size=8 * MB, piece_bytes=32 * KIB)
    assert network.run() <= 1.5 * undisturbed
    assert all(len(network.got[n]) == network.num_pieces for n in (1, 3, 4, 6, 7, 8))


def test_a_node_that_joins_late_gets_all_of_it() -> None:
    hosts = fleet(hub_mbit=100, nodes=4, up_mbit=40)
    hosts[4].joins_at = 0.4
    network = Network(hosts, size=8 * MB, piece_bytes=32 * KIB)
    network.run()
    assert all(len(had) == network.num_pieces for had in network.got[1:])


def test_pieces_that_a_node_already_has_are_not_sent() -> None:
    broadcast = started("a", num_pieces=4)
    broadcast.join("b", hand_on=False, now=0.0, have=[0, 2])
    assert {(send.node_id, send.piece) for send in broadcast.plan(0.0)} == {
        *(("a", piece) for piece in range(4)),
        ("b", 1),
        ("b", 3),
    }


def test_one_copy_leaves_the_hub_while_owners_have_room() -> None:
    broadcast = started("a", "b", "c")
    sends = broadcast.plan(0.0)[:6]
    assert all(send.hand_on for send in sends)
    assert [send.piece for send in sends] == [0, 1, 2, 3, 4, 5]
    assert {send.node_id for send in sends} == {"a", "b", "c"}


def test_a_link_counts_when_both_ends_claim_it() -> None:
    paths = BroadcastPaths()
    paths.set_links("a", ["b", "c"])
    paths.set_links("b", ["a", "nobody"])
    broadcast = Broadcast(paths=paths, num_pieces=3, piece_bytes=32 * KIB)
    for node_id in "abc":
        broadcast.join(node_id, hand_on=True, now=0.0)
    to_c = [send for send in broadcast.plan(0.0) if send.node_id == "c"]
    assert to_c and not any(send.hand_on for send in to_c)


def test_a_lost_link_is_made_up_for_at_once() -> None:
    paths = BroadcastPaths()
    linked(paths, *"abcde")
    broadcast = Broadcast(paths=paths, num_pieces=1_000, piece_bytes=32 * KIB)
    for node_id in "abcde":
        broadcast.join(node_id, hand_on=True, now=0.0)
    first = broadcast.plan(0.0)[0]
    broadcast.have(first.node_id, [first.piece], 0.01)
    linked(paths, *("abcde".replace(first.node_id, "")))
    repairs = [send for send in broadcast.plan(0.01) if send.piece == first.piece]
    assert len(repairs) == 1 and repairs[0].hand_on and repairs[0].node_id != first.node_id


def test_strangers_and_nonsense_are_ignored() -> None:
    broadcast = started("a", "b", num_pieces=2)
    broadcast.have("stranger", [0], 0.0)
    broadcast.have("a", [2, 2**20 - 1, 0, 0], 0.0)
    broadcast.leave("stranger", 0.0)
    broadcast.turn_away("stranger", 0.0)
    assert not broadcast.done
    broadcast.have("a", [1], 0.0)
    broadcast.have("b", [0, 1], 0.0)
    assert broadcast.done and not broadcast.plan(0.0)


def test_a_node_that_turned_away_gets_no_more() -> None:
    broadcast = started("a", "b")
    broadcast.turn_away("a", 0.0)
    assert {send.node_id for send in broadcast.plan(0.0)} == {"b"}
    broadcast.end(0.0)
    assert broadcast.done


def test_a_silent_node_is_given_up() -> None:
    broadcast = started("a", num_pieces=1)
    assert broadcast.plan(0.0)
    for tenth in range(120):
        broadcast.plan(tenth / 10)
    assert broadcast.done
    broadcast.join("a", hand_on=True, now=12.0, have=[])
    assert broadcast.done, "the node got the rest another way"


def test_a_node_without_news_is_given_up() -> None:
    broadcast = started("a", num_pieces=2)
    assert broadcast.plan(0.0)
    for tenth in range(120):
        broadcast.have("a", [0] if tenth % 2 else [], tenth / 10)
        broadcast.plan(tenth / 10)
    assert broadcast.done


def test_a_node_that_reconnects_joins_with_its_pieces() -> None:
    broadcast = started("a", num_pieces=3)
    broadcast.plan(0.0)
    broadcast.leave("a", 0.1)
    assert broadcast.done
    broadcast.join("a", hand_on=True, now=0.2, have=[0, 2])
    assert [send.piece for send in broadcast.plan(0.2)] == [1]


def test_a_late_piece_that_its_owner_does_not_relay_comes_another_way() -> None:
    broadcast = started(*"abc", num_pieces=4_000)
    first = broadcast.plan(0.0)[0]
    broadcast.have(first.node_id, [first.piece], 0.01)
    repeated = {}
    for tenth in range(1, 30):
        for send in broadcast.plan(tenth / 10):
            if send.piece == first.piece:
                repeated.setdefault(send.node_id, tenth / 10)
            if send.node_id != first.node_id:
                broadcast.have(send.node_id, [send.piece], tenth / 10)
    assert repeated and first.node_id not in repeated
    assert all(when >= LATE_S for when in repeated.values())


def test_owners_that_hand_nothing_on_are_benched_and_the_hub_sends_everything() -> None:
    hosts = fleet(hub_mbit=20, nodes=4, up_mbit=40)
    for host in hosts[1:]:
        host.hands_on_to = set()
    network = Network(hosts, size=2 * MB, piece_bytes=32 * KIB)
    inline_s = 4 * 2 * MB / hosts[0].up
    assert network.run() <= inline_s + 2 * LATE_S


def test_a_node_that_relayed_nothing_owns_no_piece_at_first() -> None:
    paths = BroadcastPaths()
    linked(paths, *"abc")
    first, second = (Broadcast(paths=paths, num_pieces=1_000, piece_bytes=32 * KIB) for _ in range(2))
    for broadcast in (first, second):
        for node_id in "abc":
            broadcast.join(node_id, hand_on=True, now=0.0)
    for send in first.plan(0.0):
        first.have(send.node_id, [send.piece], 0.01)
    first.plan(LATE_S + 0.2)
    first.end(LATE_S + 0.2)
    sends = second.plan(LATE_S + 0.3)
    assert sends and not any(send.hand_on for send in sends)


def test_deaf_nodes_cost_the_others_little_and_less_in_the_next_version() -> None:
    hosts = fleet(hub_mbit=100, nodes=8, up_mbit=40, delay_s=0.01)
    size, others = 8 * MB, set(range(1, 9)) - {3, 6}
    undisturbed = Network(hosts, size=size, piece_bytes=64 * KIB).run()
    for number in (3, 6):
        hosts[number].lies = lambda _: ()
        hosts[number].hands_on_to = set()
    first = Network(hosts, size=size, piece_bytes=64 * KIB)
    first.run(until=60)
    second = Network(hosts, size=size, piece_bytes=64 * KIB, after=first)
    second.run(until=60)
    third = Network(hosts, size=size, piece_bytes=64 * KIB, after=second)
    third.run(until=60)
    assert first.took_s(others) <= 1.5 * undisturbed
    assert second.took_s(others) <= 1.25 * undisturbed
    assert third.took_s(others) <= 1.25 * undisturbed


def test_the_hubs_uplink_is_not_measured_by_pieces_an_owner_may_have_sent() -> None:
    paths = BroadcastPaths()
    linked(paths, "a", "b")
    broadcast = Broadcast(paths=paths, num_pieces=1_000, piece_bytes=32 * KIB)
    broadcast.join("a", hand_on=True, now=0.0)
    broadcast.join("b", hand_on=False, now=0.0)
    owned = [send.piece for send in broadcast.plan(0.0) if send.hand_on]
    broadcast.have("a", owned, 0.01)
    paths.set_links("b", [])
    assert ("b", owned[0]) in {(send.node_id, send.piece) for send in broadcast.plan(0.1)}
    broadcast.have("b", owned[:1], 0.1001)
    assert paths["b"].push.delay == float("inf")


def test_a_silent_node_does_not_keep_the_others_waiting() -> None:
    paths = BroadcastPaths()
    broadcast = Broadcast(paths=paths, num_pieces=30, piece_bytes=64 * KIB)
    for node_id in "ab":
        broadcast.join(node_id, hand_on=False, now=0.0)
    now, got = 0.0, 0
    while got < 30 and now < 1.0:
        now += 0.001
        to_a = [send.piece for send in broadcast.plan(now) if send.node_id == "a"]
        broadcast.have("a", to_a, now)
        got += len(to_a)
    assert got == 30


def test_the_one_that_is_asked_first_has_the_uplink() -> None:
    paths = BroadcastPaths()
    linked(paths, "a", "b")
    older, newer = (Broadcast(paths=paths, num_pieces=1_000, piece_bytes=32 * KIB) for _ in range(2))
    for broadcast in (older, newer):
        for node_id in "ab":
            broadcast.join(node_id, hand_on=True, now=0.0)
    assert newer.plan(0.0) and not older.plan(0.0)


def large(nodes: int, *, degree: int = 16, up_mbit: float = 20.0) -> list[Host]:
    hosts = fleet(hub_mbit=20, nodes=nodes, up_mbit=up_mbit)
    neighbours = Neighbours(degree=degree, draw=random.Random(4).randrange)
    for number in range(1, nodes + 1):
        neighbours.join(str(number), listens=True)
    for number in range(1, nodes + 1):
        hosts[number].links = {int(other) for other in neighbours.of(str(number))}
    return hosts


def test_a_large_fleet_with_few_links_each_is_close_to_the_bound() -> None:
    hosts = large(40)
    network = Network(hosts, size=4 * MB, piece_bytes=64 * KIB)
    assert network.run() <= bound_s(hosts, 4 * MB) + 1.0
    assert network.directs < 2 * network.num_pieces and network.broadcast.done
    for number in range(1, 41):
        hosts[number].up = (8 + 32 * (number % 5) / 4) * MBIT
    assert Network(hosts, size=4 * MB, piece_bytes=64 * KIB, after=network).run() <= bound_s(hosts, 4 * MB) + 1.0


def test_pieces_that_bad_relays_drop_are_relayed_by_others() -> None:
    hosts = large(24, degree=8, up_mbit=40)
    undisturbed = Network(hosts, size=4 * MB, piece_bytes=64 * KIB).run()
    for number in (3, 9, 17):
        hosts[number].hands_on_to = set()
    first = Network(hosts, size=4 * MB, piece_bytes=64 * KIB)
    assert first.run() <= 2 * undisturbed
    second = Network(hosts, size=4 * MB, piece_bytes=64 * KIB, after=first)
    assert second.run() <= 1.5 * undisturbed, "the bad relays are known by then"


def test_relays_that_die_are_made_up_for() -> None:
    hosts = large(24, degree=8, up_mbit=40)
    undisturbed = Network(hosts, size=4 * MB, piece_bytes=64 * KIB).run()
    for number in (2, 5, 11):
        hosts[number].dies_at = 0.6
    network = Network(hosts, size=4 * MB, piece_bytes=64 * KIB)
    assert network.run() <= 1.5 * undisturbed
    assert all(len(network.got[n]) == network.num_pieces for n in range(1, 25) if n not in network.dead)


def test_a_late_node_gets_its_neighbours_pieces_from_them() -> None:
    broadcast = started(*"abc", num_pieces=8)
    paths = broadcast._paths
    assert {send.piece for send in broadcast.plan(0.0)} == set(range(8))
    for name in "abc":
        broadcast.have(name, range(8), 0.1)
    paths.set_links("d", "abc")
    for name in "abc":
        paths.set_links(name, [other for other in "abcd" if other != name])
    broadcast.join("d", hand_on=True, now=0.2)
    sends = broadcast.plan(0.2)
    told = [send for send in sends if send.is_there]
    assert [send.piece for send in told] == list(range(6)) and {send.node_id for send in told} == set("abc")
    assert {send.hand_on for send in told} == {to(3)}
    assert {send.piece for send in sends if not send.is_there} <= {6, 7}, (
        "the pieces that the neighbours have no capacity for yet"
    )
    broadcast.have("d", [told[0].piece], 0.3)
    assert (broadcast.left_of(told[0]), broadcast.left_of(told[1])) == (None, told[1])
    gone = told[1].node_id
    broadcast.leave(gone, 0.3)
    again = [send for send in broadcast.plan(0.3) if send.is_there and send.piece == told[1].piece]
    assert len(again) == 1 and again[0].node_id != gone


def test_a_node_that_gets_nothing_from_its_neighbour_is_served_by_the_hub() -> None:
    broadcast = started("a", "b", num_pieces=2)
    assert broadcast.plan(0.0)
    broadcast.have("a", [0, 1], 0.1)
    broadcast.leave("b", 0.1)
    broadcast.join("b", hand_on=True, now=0.2)
    assert [(send.node_id, send.is_there) for send in broadcast.plan(0.2)] == [("a", True)] * 2
    later = [send for tenth in range(3, 30) for send in broadcast.plan(tenth / 10)]
    assert [(send.node_id, send.piece, send.is_there) for send in later] == [("b", 0, False), ("b", 1, False)]


def hosts_of_any_kind(least: int = 1, most: int = 6) -> st.SearchStrategy[list[Host]]:
    numbers = st.integers(1, most)
    some = st.none() | st.sets(numbers, max_size=most)
    node = st.builds(
        Host,
        up=st.floats(0.5, 100).map(lambda mbit: mbit * MBIT),
        down=st.floats(2, 100).map(lambda mbit: mbit * MBIT),
        delay_s=st.floats(0, 0.05),
        links=some,
        hands_on_to=some,
        joins_at=st.just(0.0) | st.floats(0, 2),
        dies_at=st.just(float("inf")) | st.floats(0, 2),
        lies=st.none() | st.sampled_from([lambda piece: (), lambda piece: (piece + 1, piece + 7, 2**19)]),
    )
    hub = st.floats(5, 200).map(lambda mbit: Host(up=mbit * MBIT, down=1_000 * MBIT))
    return st.builds(lambda hub, nodes: [hub, *nodes], hub, st.lists(node, min_size=least, max_size=most))


@settings(max_examples=50, deadline=None)
@given(hosts_of_any_kind() | hosts_of_any_kind(13, 15), st.integers(1, 60))
def test_every_honest_node_gets_every_piece_despite_failures(hosts: list[Host], num_pieces: int) -> None:
    for host in hosts[1:]:
        if host.dies_at <= host.joins_at:
            host.dies_at = float("inf")
    network = Network(hosts, size=num_pieces * 32 * KIB, piece_bytes=32 * KIB)
    network.run(until=600)
    assert network.broadcast.done
    for number, host in enumerate(hosts):
        if number and host.lies is None and number not in network.dead:
            assert len(network.got[number]) == num_pieces
    assert network.paths.uplink.bytes_in_flight == 0
    for number in range(1, len(hosts)):
        handing = network.paths[f"n{number}"].handing
        assert (handing.work_bytes, handing.bytes_in_flight) == (0, 0)


@settings(max_examples=30, deadline=None)
@given(hosts_of_any_kind())
def test_the_hub_never_sends_a_piece_twice_while_it_is_in_transit(hosts: list[Host]) -> None:
    paths = BroadcastPaths()
    names = [f"n{number}" for number in range(1, len(hosts))]
    linked(paths, *names)
    broadcast = Broadcast(paths=paths, num_pieces=20, piece_bytes=32 * KIB)
    for name in names:
        broadcast.join(name, hand_on=True, now=0.0)
    sent = [send for now in (0.0, 0.2, 0.4, 1.5, 3.0) for send in broadcast.plan(now)]
    pairs = sorted((send.node_id, send.piece) for send in sent)
    assert all(one != other for one, other in pairwise(pairs))
