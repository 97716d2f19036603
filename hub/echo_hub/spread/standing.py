"""State of one broadcast: missing pieces by node, pieces in flight, and relays by owner.

This module processes events and keeps the flow-control windows of the hub's uplink and of the nodes. `broadcast`
decides what to send. Sets of nodes are bit masks by node number.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Final

from echo_hub.spread.forest import Forest
from echo_hub.spread.members import Member, PieceRelay
from echo_hub.spread.trees import bits
from echo_hub.spread.windows import BroadcastPaths

LONGEST_BENCH_S: Final = 60.0
"""Longest time, in seconds, for which a node that failed to hand pieces on gets none to hand on."""


class BroadcastStatus:
    def __init__(self, *, paths: BroadcastPaths, num_pieces: int, piece_bytes: int) -> None:
        self._paths = paths
        self._num_pieces = num_pieces
        self._piece_bytes = piece_bytes
        self._members: dict[str, Member] = {}
        self._turned_away: set[str] = set()
        self._by_number: dict[int, Member] = {}
        self._forest = Forest(paths, self._by_number, piece_bytes)
        self._num_lacking = 0
        """Number of members (nodes of the broadcast) that lack a piece."""
        self._queued: dict[str, Member] = {}
        """Members for which pieces are queued that the hub sends itself; some of the pieces may have arrived
        meanwhile."""
        self._owners = 0
        """Members that may get pieces to hand on (owners), as a bit mask."""
        self._missing = [0] * num_pieces
        """For each piece, the members that lack it, as a bit mask."""
        self._covered = [0] * num_pieces
        """For each piece, the members that lack the piece but already have a source for it: the hub's queue, the hub's
        uplink, an owner or a neighbour.
        """
        self._next_fresh = 0
        """Lowest number of a piece that no node has got from the hub."""
        self._rest: dict[int, None] = {}
        """Pieces that the hub has sent to some nodes, while other nodes still lack a source for these pieces."""
        self._rest_changed = False
        self._rest_open = False
        """True if something changed, so that some node may now be told to send its neighbour a piece for which the
        neighbour has no source."""
        self._relays: dict[int, list[PieceRelay]] = {}
        self._uncovered_once: set[int] = set()
        """Pieces for which a source failed: after the copy from a new source, a late copy from the old one may
        arrive."""
        self._copies_to_come = 0
        """Number of copies of pieces that nodes were told to hand on and that have not arrived."""
        self._lagging = 0
        self._links_seen = -1
        self._check_at = 0.0

    @property
    def done(self) -> bool:
        return not self._num_lacking

    def join(self, node_id: str, *, hand_on: bool, now: float, have: Collection[int] = ()) -> None:
        """Add a node that wants the pieces it does not `have`. `hand_on`: the node may hand pieces on. Present members
        and nodes turned away earlier are ignored."""
        if node_id in self._members or node_id in self._turned_away:
            return
        path = self._paths[node_id]
        wanted = sorted(set(range(self._num_pieces)).difference(have))
        member = Member(node_id, path.number, 1 << path.number, path, len(wanted), heard_at=now)
        self._members[node_id] = self._by_number[path.number] = member
        self._num_lacking += bool(wanted)
        if hand_on:
            self._owners |= member.bit
        for piece in wanted:
            self._missing[piece] |= member.bit
            if piece < self._next_fresh:
                self._want_source(piece)
        self._members_changed()

    def _members_changed(self) -> None:
        self._links_seen = -1
        self._forest.links_changed()
        self._paths.news += 1

    def leave(self, node_id: str, now: float) -> None:
        """Remove a node that disconnected; it may join again. Nodes that waited for pieces
        from it get other sources.
        """
        self._turned_away.discard(node_id)
        if node_id in self._members:
            self._remove(self._members[node_id], now)

    def _remove(self, member: Member, now: float) -> None:
        del self._members[member.node_id]
        for piece in list(member.flights):
            self._landed(member, piece, None)
        for relay in list(member.relays.values()):
            self._end(relay)
        for piece in list(member.promised):
            self._promise_ends(member, piece, None)
        bit = member.bit
        self._queued.pop(member.node_id, None)
        self._num_lacking -= bool(member.num_missing)
        self._owners &= ~bit
        for piece in range(self._num_pieces):
            self._missing[piece] &= ~bit
            self._covered[piece] &= ~bit
        for relays in list(self._relays.values()):
            for relay in list(relays):
                self._drop(relay, bit | relay.tree.below(member.number), now)
        del self._by_number[member.number]
        for other in self._members.values():
            for piece in [piece for piece, (holder, _) in other.promised.items() if holder is member]:
                self._promise_ends(other, piece, None)
        self._members_changed()

    def turn_away(self, node_id: str, now: float) -> None:
        """Remove a node that lacks pieces for good, because it fetches them elsewhere. A complete node may continue
        handing pieces on."""
        self._turned_away.add(node_id)
        member = self._members.get(node_id)
        if member is not None and member.num_missing:
            self._remove(member, now)

    def end(self, now: float) -> None:
        for member in list(self._members.values()):
            self._remove(member, now)

    def have(self, node_id: str, pieces: Iterable[int], now: float) -> None:
        """Record that the node has these pieces, from any source."""
        member = self._members.get(node_id)
        if member is None:
            return
        bit = member.bit
        for piece in pieces:
            if piece >= self._num_pieces or not self._missing[piece] & bit:
                continue
            self._missing[piece] ^= bit
            if self._covered[piece] & bit:
                self._covered[piece] ^= bit
            member.num_missing -= 1
            if not member.num_missing:
                self._num_lacking -= 1
            member.heard_at = now
            member.path.has_confirmed = True
            relays = tuple(self._relays.get(piece, ()))
            if piece in member.flights:
                # Another node may have delivered the piece first, so the time proves nothing about the hub's uplink.
                doubtful = piece in self._uncovered_once or any(relay.waiting & bit for relay in relays)
                self._landed(member, piece, None if doubtful else now)
            if piece in member.promised:
                self._promise_ends(member, piece, now)
            for relay in relays:
                self._passed(relay, member, now)

    def _started(self, piece: int, covered: int) -> None:
        """Record that the members in `covered` now have a source for the piece."""
        self._covered[piece] |= covered
        if piece == self._next_fresh:
            self._next_fresh += 1
        if self._missing[piece] & ~self._covered[piece]:
            self._want_source(piece)
        else:
            self._rest.pop(piece, None)

    def _want_source(self, piece: int) -> None:
        self._rest[piece] = None
        self._rest_changed = self._rest_open = True
        self._paths.news += 1

    def _landed(self, member: Member, piece: int, now: float | None) -> None:
        """Record that a piece sent by the hub arrived at time `now`. None: the piece is lost, or its arrival time says
        nothing about the path.
        """
        sent_at = member.flights.pop(piece)
        self._paths.news += 1
        windows = [member.path.push]
        if piece in member.overdue:
            member.overdue.remove(piece)
        else:
            windows.append(self._paths.uplink)
        for window in windows:
            if now is None:
                window.lost(self._piece_bytes)
            else:
                window.arrived(self._piece_bytes, now - sent_at, now)

    def _passed(self, relay: PieceRelay, member: Member, now: float) -> None:
        """Record that a relayed piece arrived at a member, which now hands it on to its children in the tree."""
        tree, number, piece_bytes = relay.tree, member.number, self._piece_bytes
        if relay.waiting & member.bit:
            relay.waiting ^= member.bit
            source = self._by_number.get(tree.parents[number])
            if source is not None:
                handing = source.path.handing
                handing.work_bytes -= piece_bytes
                self._copies_to_come -= 1
                if not self._missing[relay.piece] & source.bit:
                    handing.arrived(piece_bytes, now)
        if number in tree.kids and (kids := tree.kids[number] & relay.waiting):
            member.path.handing.sent(kids.bit_count() * piece_bytes, now)
        if relay.counts:
            self._free(relay, now)
        if not relay.waiting:
            self._end(relay)

    def _drop(self, relay: PieceRelay, nodes: int, now: float) -> None:
        """Remove these nodes from the relay of a piece, because its tree no longer reaches them. They need another
        source."""
        nodes &= relay.waiting
        self._release(relay, nodes)
        relay.waiting &= ~nodes
        self._free(relay, now)
        if not relay.waiting:
            self._end(relay)
        self._uncover(relay.piece, nodes)

    def _release(self, relay: PieceRelay, nodes: int) -> None:
        for number in bits(nodes):
            source = self._by_number.get(relay.tree.parents[number])
            if source is not None:
                source.path.handing.work_bytes -= self._piece_bytes
                self._copies_to_come -= 1
                if not self._missing[relay.piece] & source.bit:
                    source.path.handing.lost(self._piece_bytes)

    def _free(self, relay: PieceRelay, now: float) -> None:
        """Let the piece's owner take new work once all nodes have the piece, except stragglers (the slowest few)."""
        if not relay.counts or relay.waiting & ~self._lagging or self._missing[relay.piece] & relay.owner.bit:
            return
        relay.counts = False
        self._paths.news += 1
        relay.owner.path.num_late = 0
        if relay.helped:
            relay.owner.path.relay.lost(self._piece_bytes)
        else:
            relay.owner.path.relay.arrived(self._piece_bytes, now - relay.since, now)

    def _end(self, relay: PieceRelay) -> None:
        """End the handing-on of a piece by its owner. Nodes that still wait need another source."""
        self._release(relay, relay.waiting)
        if relay.counts:
            relay.owner.path.relay.lost(self._piece_bytes)
        piece = relay.piece
        del relay.owner.relays[piece]
        self._relays[piece].remove(relay)
        if not self._relays[piece]:
            del self._relays[piece]
        self._uncover(piece, relay.waiting)

    def _uncover(self, piece: int, nodes: int) -> None:
        others = 0
        for relay in self._relays.get(piece, ()):
            others |= relay.waiting
        for member in self._each(nodes & self._missing[piece] & ~others):
            if piece not in member.flights and piece not in member.promised:
                self._covered[piece] &= ~member.bit
                self._want_source(piece)
                self._uncovered_once.add(piece)

    def _bench(self, owner: Member, now: float) -> None:
        if (path := owner.path).benched_until <= now:
            path.num_late += 1
            self._forest.look_again()
            path.benched_until = now + min(2.0**path.num_late, LONGEST_BENCH_S)

    def _look_at_links(self, now: float) -> None:
        """Recompute which members are linked with which, after a change of links or members. Pieces are no longer
        handed on over a lost link.
        """
        self._links_seen = self._paths.links_changed
        self._forest.links_changed()
        for member in self._members.values():
            peers = (self._members.get(peer) for peer in member.path.links)
            member.reach = 0
            for peer in peers:
                if peer is not None and peer is not member and member.node_id in peer.path.links:
                    member.reach |= peer.bit
        for relay in [relay for relays in self._relays.values() for relay in relays]:
            cut = 0
            for number in bits(relay.waiting):
                source = self._by_number.get(relay.tree.parents[number])
                if source is None or not source.reach >> number & 1:
                    cut |= 1 << number | relay.tree.below(number)
            if cut:
                self._drop(relay, cut, now)

    def _promise_ends(self, member: Member, piece: int, now: float | None) -> None:
        """Cancel the hub's order to a neighbour to send the member a piece: the piece arrived at `now`; None: it will
        not arrive this way."""
        holder, _ = member.promised.pop(piece)
        handing = holder.path.handing
        handing.work_bytes -= self._piece_bytes
        self._copies_to_come -= 1
        self._rest_open = True
        self._paths.news += 1
        if now is None:
            handing.lost(self._piece_bytes)
            self._uncover(piece, member.bit)
        else:
            handing.arrived(self._piece_bytes, now)

    def _each(self, nodes: int) -> Iterator[Member]:
        while nodes:
            bit = nodes & -nodes
            nodes ^= bit
            yield self._by_number[bit.bit_length() - 1]
