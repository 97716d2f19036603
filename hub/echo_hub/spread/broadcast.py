"""Plan of the peer-assisted broadcast: which piece of a version each node gets next, and by which tree of nodes a piece
is handed on.

Example: four pieces, linked nodes a and b, unlinked node c.

    first      hub → a   pieces 0 and 2, to hand on      hub → b   pieces 1 and 3, to hand on
    then       hub → c   all four pieces, directly
    meanwhile  a → b     pieces 0 and 2                  b → a     pieces 1 and 3

Eight pieces cross the hub's uplink, not twelve. If node a left or were slow, b would get pieces 0 and 2 from the hub.

The broadcast is fastest under two conditions. No uplink idles, of hub or nodes. No piece crosses the hub's uplink twice
before the nodes' uplinks are busy (Kumar and Ross, Peer-Assisted File Distribution: The Minimum Distribution Time,
2006). So, in this order, while the hub's uplink has room:

1. An *owned* piece goes to one node, its owner, that has few pieces left to hand on. The tree to the other nodes goes
   with it. The tree is a star in a small fleet and deep in a large one (`forest`).
2. Pieces that a node gets from no peer go to it *directly*.
3. When every owner has enough pieces to hand on and the hub's uplink is about to idle, a piece goes directly to all
   nodes that lack it.
4. When every piece was sent to some node, the hub *helps*: it also sends pieces that would arrive later from their
   owner.

If the source of a node's piece leaves, is late or loses its link, a linked node with the piece is told to *take over*.
Without such a node, step 1 or 2 sends the piece again. The same holds for pieces that were distributed before a node
joined. A slow receiver delays no other node: an owner's work counts as done once all nodes except a few stragglers have
the piece.

A node's false claims affect only itself: a node that claims pieces it lacks does not get them. An owner that does not
hand on is *benched*: it owns no pieces for a while, including later broadcasts, and longer each time. Afterwards it
gets one piece at a time to hand on until it succeeds, like a node that has not confirmed any piece. A link counts only
if both ends report it.

Sets of nodes are bit masks by node number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean
from typing import Final

from echo_hub.spread.members import Member, PieceRelay
from echo_hub.spread.standing import BroadcastStatus
from echo_hub.spread.trees import star
from echo_hub.spread.windows import FIRST_PUSH_BYTES, BroadcastPaths
from echo_shared.wire import relay_tree

LEAST_PIECES: Final = 2
"""Minimum number of pieces in flight that any flow-control window allows: one under way and the next one."""

LEAST_RELAY_BYTES: Final = 128 * 1024
"""Least work that a node of unknown speed gets for handing pieces on, in bytes. A copy that a node hands on is cheap,
while each direct copy costs the hub's uplink."""

SPARE_SLACK_S: Final = 0.17
"""The hub's uplink counts as about to idle if its queue needs less than this many seconds."""

MOST_SPARE_S: Final = 1.0
"""Maximum seconds for which sending one piece directly to all nodes may occupy the hub's uplink."""

MOST_TAKEN_OVER: Final = 64
"""Maximum number of pieces without a source that are offered to neighbours in one call of `plan`."""
MOST_PROMISED: Final = 16
"""Maximum number of pieces that one node lacks and that the hub has told its neighbours to send to it."""
TAKEN_OVER_S: Final = 1.5
"""Seconds within which a neighbour must deliver a piece that the hub told it to hand on. After a failure, the receiving
node gets its missing pieces from the hub."""

LEAST_OF_A_TREE: Final = 8
"""Minimum number of nodes lacking a piece for which a deep tree is made. Fewer nodes are served by neighbours or
directly."""
MOST_HELPED: Final = 32
"""Largest number of waiting nodes at which the hub sends a handed-on piece itself. For more nodes its uplink is too
slow."""

MOST_TRIED: Final = 16
"""Maximum number of partly distributed pieces for which one call looks for a node to hand them on."""

CHECK_S: Final = 0.1
"""Seconds between two checks for late pieces."""

OVERDUE_S: Final = 0.5
"""Seconds after which an unconfirmed piece must be stuck beyond the hub's uplink. From then on, it no longer counts as
queued there."""

FEW: Final = 4
"""Divisor: a quarter of the nodes that wait for a handed-on piece may be slow without delaying the next piece of the
node that hands it on."""

STRAGGLER_S: Final = 0.3
"""Seconds after which the last few nodes that wait for a handed-on piece count as stragglers: the node that hands it on
gets new work without them."""
LONE_STRAGGLER_S: Final = 0.6
"""Takes the place of STRAGGLER_S if fewer than FEW nodes should get the piece. Then a single straggler exceeds the
share of nodes that may be slow."""
LATE_S: Final = 2.0
LATE_DELAYS: Final = 4
"""A piece that a node hands on is late after LATE_S seconds, or after LATE_DELAYS times that node's usual delay if that
is longer. The hub then sends the piece."""

LATE_DEEP_S: Final = 1.0
LATE_TAKES: Final = 1.5
"""A piece in a deep tree is late after LATE_DEEP_S plus this many times its planned duration."""

GIVE_UP_S: Final = 10.0
"""Seconds without a new piece, while pieces are under way to a node, after which the node counts as fetching the
version elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SendPiece:
    """Instruction to send one piece to one node."""

    node_id: str
    piece: int
    hand_on: bytes = b""
    """Packed instructions for handing the piece on (`echo_shared.wire.relay_tree`)."""
    is_there: bool = False
    """True if the node holds the piece and only needs instructions for further hops."""


class Broadcast(BroadcastStatus):
    """Broadcast of one artefact.

    Concurrent broadcasts share `paths` and so the hub's uplink: the one whose `plan` is called first has priority.
    """

    def __init__(self, *, paths: BroadcastPaths, num_pieces: int, piece_bytes: int) -> None:
        super().__init__(paths=paths, num_pieces=num_pieces, piece_bytes=piece_bytes)
        self._least_bytes = LEAST_PIECES * piece_bytes
        self._least_relay_bytes = max(2 * self._least_bytes, LEAST_RELAY_BYTES)
        self._usual_relay_rate = 0.0
        self._news_seen = -1

    def left_of(self, send: SendPiece) -> SendPiece | None:
        """Return the part of `send` that is still useful when its turn at the uplink comes; None if nothing is left to
        do."""
        member, piece = self._members.get(send.node_id), send.piece
        if member is None:
            return None
        if send.is_there:
            waiting = [number for number, _ in relay_tree.split(send.hand_on) if self._waits(number, piece, member)]
            return replace(send, hand_on=relay_tree.pack((one, 0, b"") for one in waiting)) if waiting else None
        relay = member.relays.get(piece)
        if relay is not None and send.hand_on:
            return replace(send, hand_on=relay.tree.packed(relay.waiting))
        return replace(send, hand_on=b"") if piece in member.flights else None

    def _waits(self, number: int, piece: int, holder: Member) -> bool:
        member = self._by_number.get(number)
        return member is not None and member.promised.get(piece, (None, 0.0))[0] is holder

    def plan(self, now: float) -> list[SendPiece]:
        """Return what the hub should send now. Call this after every event, and after CHECK_S seconds without one."""
        if self._links_seen != self._paths.links_changed:
            self._look_at_links(now)
        elif self._news_seen == self._paths.news and now < self._check_at:
            return []
        self.check(now)
        self._forest.look(self._owners, now)
        self._look_at_rates()
        sends = self._take_over(now)
        while self._paths.uplink.has_room(max(self._least_bytes, FIRST_PUSH_BYTES)):
            if self._rest_changed:
                self._settle_rest(now)
            send = self._owned(now) or self._direct(now) or self._spare(now) or self._help(now)
            if send is None:
                break
            sends.append(send)
        self._news_seen = self._paths.news
        return sends

    # --- sending

    def _owned(self, now: float) -> SendPiece | None:
        """Return an instruction for the oldest piece without an owner. The hub sends the piece to the node that would
        finish handing it on first. None: there is no such piece, or no such node."""
        if self._forest.is_deep and not self._forest.has_room(self._copies_to_come):
            return None
        for piece in self._wanting_owner():
            uncovered = self._missing[piece] & ~self._covered[piece]
            owners = _to_be_trusted(self._eligible(uncovered, now))
            if not self._forest.is_deep:
                owners = [m for m in owners if m.path.relay.has_room(self._least_relay_bytes)]
                owners.sort(key=self._relayed_in_s)
            for owner in owners:
                if owner.path.push.has_room(self._least_bytes):
                    return self._hand_to(owner, piece, uncovered, now)
        return None

    def _relayed_in_s(self, owner: Member) -> tuple[float, int]:
        """Return the work that the owner has to hand on, one more piece included, in seconds (0 = unknown) and in
        bytes."""
        work = owner.path.relay.bytes_in_flight + self._piece_bytes
        rate = self._relay_rate(owner)
        return (work / rate if rate else 0.0, work)

    def _relay_rate(self, owner: Member) -> float | None:
        """Return the bytes per second at which the owner hands pieces on; None = unknown.

        The measured rate of an owner that never had a full window is only a lower bound. So assume at least the average
        of the fully loaded owners or, without any, the best measured rate.
        """
        relay = owner.path.relay
        return relay.rate if relay.kept_full else max(relay.rate or 0.0, self._usual_relay_rate) or None

    def _look_at_rates(self) -> None:
        if self._forest.is_deep:
            return
        relays = [member.path.relay for member in self._members.values()]
        known = [relay.rate for relay in relays if relay.rate and relay.kept_full]
        best = max((relay.rate for relay in relays if relay.rate), default=0.0)
        self._usual_relay_rate = fmean(known) if known else best

    def _wanting_owner(self) -> Iterator[int]:
        yield from list(islice(self._rest, MOST_TRIED))
        fresh = self._fresh()
        if fresh is not None:
            yield fresh

    def _fresh(self) -> int | None:
        while self._next_fresh < self._num_pieces and not self._missing[self._next_fresh]:
            self._next_fresh += 1
        return self._next_fresh if self._next_fresh < self._num_pieces else None

    def _eligible(self, uncovered: int, now: float) -> list[Member]:
        """Return the nodes that may hand on a piece. `uncovered`: bit mask of the nodes that lack the piece and have no
        source.

        A node reaches itself and all nodes linked with it. A candidate must reach at least two of the `uncovered`
        nodes, and at least half as many as the best candidate.
        """
        if self._forest.is_deep:
            return self._forest.roots(uncovered & self._owners) if uncovered.bit_count() >= LEAST_OF_A_TREE else []
        reached = [
            (((m.reach | m.bit) & uncovered).bit_count(), m)
            for m in self._members.values()
            if m.bit & uncovered & self._owners and m.path.benched_until <= now
        ]
        most = max((count for count, _ in reached), default=0)
        return [m for count, m in reached if count >= 2 and 2 * count >= most]

    def _hand_to(self, owner: Member, piece: int, uncovered: int, now: float) -> SendPiece:
        window, tree = owner.path.relay, self._forest.tree(owner, uncovered)
        asked = tree.covers & uncovered
        takes_s = tree.takes_s or self._relayed_in_s(owner)[0]
        relay = PieceRelay(owner, piece, tree, now, now + window.delay + takes_s, asked, asked)
        owner.relays[piece] = relay
        window.sent(self._piece_bytes, now)
        for number, kids in tree.kids.items():
            copies = (kids & asked).bit_count()
            self._by_number[number].path.handing.work_bytes += copies * self._piece_bytes
            self._copies_to_come += copies
        self._relays.setdefault(piece, []).append(relay)
        self._started(piece, asked | owner.bit)
        return self._send(owner, piece, now, hand_on=tree.packed(asked))

    def _settle_rest(self, now: float) -> None:
        """Queue pieces that the hub must send directly, for nodes to which no other node would send them."""
        self._rest_changed = False
        for piece in list(self._rest):
            uncovered = self._missing[piece] & ~self._covered[piece]
            if not self._eligible(uncovered, now):
                self._queue_directly(piece, self._left_to_hub(piece, uncovered, now))

    def _queue_directly(self, piece: int, nodes: int) -> None:
        for member in self._each(nodes):
            member.direct.append(piece)
            self._queued[member.node_id] = member
        self._started(piece, nodes)

    def _direct(self, now: float) -> SendPiece | None:
        ready = [m for m in self._each_queued() if m.path.push.has_room(self._least_bytes)]
        if not ready:
            return None
        member = min(ready, key=lambda m: m.path.push.bytes_in_flight)
        return self._send(member, member.direct.popleft(), now)

    def _each_queued(self) -> Iterator[Member]:
        """Yield the members that wait for pieces from the hub itself. First remove pieces from their queues that
        arrived from other nodes."""
        for member in list(self._queued.values()):
            while member.direct and not self._missing[member.direct[0]] & member.bit:
                member.direct.popleft()
            if member.direct:
                yield member
            else:
                del self._queued[member.node_id]

    def _spare(self, now: float) -> SendPiece | None:
        """If no owner can take a piece and the hub's uplink would idle, queue a piece for direct sending to all nodes
        that lack it, and return its first send."""
        piece, uplink = next(self._wanting_owner(), None), self._paths.uplink
        if piece is None or uplink.bytes_in_flight >= uplink.size(self._least_bytes, SPARE_SLACK_S):
            return None
        uncovered = self._missing[piece] & ~self._covered[piece]
        if uplink.rate and uncovered.bit_count() * self._piece_bytes > MOST_SPARE_S * uplink.rate:
            return None
        if self._eligible(uncovered, now) and FEW * self._num_queued() > len(self._members):
            return None  # An owner may be free before the last direct copy has left.
        self._queue_directly(piece, uncovered)
        return self._direct(now)

    def _num_queued(self) -> int:
        return sum(not member.overdue for member in self._each_queued())

    def _help(self, now: float) -> SendPiece | None:
        """Choose, of the pieces that other nodes hand on, the one that is expected to arrive last. Return an
        instruction to send it directly if the hub can deliver it sooner; else None."""
        if next(self._wanting_owner(), None) is not None:
            return None
        uplink = self._paths.uplink
        latest = 0.0
        if uplink.rate:
            latest = uplink.delay + (uplink.bytes_in_flight + self._piece_bytes) / uplink.rate
        chosen: tuple[PieceRelay, Member] | None = None
        for owner in dict.fromkeys(relay.owner for relays in self._relays.values() for relay in relays):
            oldest = next(iter(owner.relays.values()), None)
            # A rate that was assumed, not measured, is used only until the owner's oldest piece is due.
            is_late = oldest is not None and not now <= oldest.due_at < float("inf")
            rate = owner.path.relay.rate if is_late else self._relay_rate(owner)
            each_s = self._piece_bytes / rate if rate else float("inf")
            for place, relay in enumerate(owner.relays.values(), start=1):
                ahead_s = relay.due_at - now if relay.tree.takes_s else place * each_s
                # Expect a late piece to need as long again as it is late already.
                left_s = max(ahead_s, now - relay.due_at)
                if left_s > latest and (member := self._helpable(relay)) is not None:
                    latest, chosen = left_s, (relay, member)
        if chosen is None:
            return None
        relay, member = chosen
        relay.helped = True
        return self._send(member, relay.piece, now)

    def _helpable(self, relay: PieceRelay) -> Member | None:
        """Return a node that waits for the handed-on piece and can get it from the hub; None if there is none, or too
        many nodes wait.
        """
        if relay.waiting.bit_count() > MOST_HELPED:
            return None
        for member in self._each(relay.waiting):
            if relay.piece not in member.flights and member.path.push.has_room(self._least_bytes):
                return member
        return None

    def _send(self, member: Member, piece: int, now: float, *, hand_on: bytes = b"") -> SendPiece:
        if not member.flights:
            member.heard_at = now
        member.flights[piece] = now
        member.path.push.sent(self._piece_bytes, now)
        self._paths.uplink.sent(self._piece_bytes, now)
        return SendPiece(node_id=member.node_id, piece=piece, hand_on=hand_on)

    # --- lateness

    def check(self, now: float) -> None:
        """Find late pieces and stragglers, at most every CHECK_S seconds.

        `plan` calls this too. With several broadcasts, call it for all of them first, so that the capacity freed by
        late pieces goes to the broadcast with priority.
        """
        if now < self._check_at:
            return
        self._check_at = now + CHECK_S
        self._rest_changed = self._rest_open = True  # Some benched nodes may own pieces again.
        for member in list(self._members.values()):
            if member.flights and now - member.heard_at > GIVE_UP_S:
                self._bench(member, now)
                self.turn_away(member.node_id, now)
                continue
            for piece, sent_at in member.flights.items():
                if now - sent_at > OVERDUE_S and piece not in member.overdue:
                    member.overdue.add(piece)
                    self._paths.news += 1
                    self._paths.uplink.lost(self._piece_bytes)
            for piece, (_, since) in list(member.promised.items()):
                if now - since > TAKEN_OVER_S:
                    member.is_slow = True
                    self._promise_ends(member, piece, None)
        relays = [relay for relays in self._relays.values() for relay in relays]
        self._lagging = sum(m.bit for m in self._members.values() if m.overdue and not m.path.proven)
        for relay in relays:
            asked, waits_s = relay.asked.bit_count(), now - relay.since
            few = asked // FEW or int(asked > 1 and waits_s > LONE_STRAGGLER_S)
            if waits_s > STRAGGLER_S and relay.waiting.bit_count() <= few:
                self._lagging |= relay.waiting
        for relay in relays:
            self._free(relay, now)
            if now - relay.since > self._late_s(relay):
                self._too_late(relay, now)

    def _late_s(self, relay: PieceRelay) -> float:
        """Return the seconds after which nodes that still lack a piece stop waiting for its owner and get it from
        another source."""
        if relay.tree.takes_s:
            return LATE_DEEP_S + LATE_TAKES * relay.tree.takes_s
        delay = relay.owner.path.relay.delay
        return max(LATE_S, LATE_DELAYS * delay if delay < float("inf") else 0.0)

    def _too_late(self, relay: PieceRelay, now: float) -> None:
        """Stop waiting for a piece that is handed on too late. Bench (give no pieces to hand on for a while) each node
        that had the piece but served fewer than half of its children."""
        owner = relay.owner
        if self._missing[relay.piece] & owner.bit:
            self._bench(owner, now)
        for number, kids in relay.tree.kids.items():
            member, waiting = self._by_number.get(number), kids & relay.waiting
            if member is None or not waiting or self._missing[relay.piece] & member.bit:
                continue
            if 2 * waiting.bit_count() > (kids & relay.asked).bit_count() and (
                member is owner or waiting & (waiting - 1)
            ):
                self._bench(member, now)
        self._end(relay)

    # --- take-over by neighbours

    def _take_over(self, now: float) -> list[SendPiece]:
        """Return instructions for take-overs: nodes with a piece send it to neighbours without another source."""
        sends: list[SendPiece] = []
        if not self._rest_open:
            return sends
        self._rest_open = False
        full = 0
        for piece in list(islice(self._rest, MOST_TAKEN_OVER)):
            uncovered = self._missing[piece] & ~self._covered[piece]
            told: dict[int, int] = {}
            for member in self._each(uncovered & ~full):
                if member.is_slow or member.overdue or len(member.promised) >= MOST_PROMISED:
                    continue
                holders = [
                    one
                    for one in self._each(member.reach & self._owners & ~self._missing[piece])
                    if one.path.proven and one.path.benched_until <= now
                ]
                free = [one for one in holders if one.path.handing.has_room(self._piece_bytes)]
                if not free:
                    full |= member.bit if holders else 0
                    continue
                holder = min(free, key=lambda one: one.path.handing.bytes_in_flight)
                holder.path.handing.sent(self._piece_bytes, now)
                holder.path.handing.work_bytes += self._piece_bytes
                self._copies_to_come += 1
                member.promised[piece] = holder, now
                told[holder.number] = told.get(holder.number, 0) | member.bit
            for number, mask in told.items():
                packed = star(number, mask).packed(mask)
                sends.append(
                    SendPiece(node_id=self._by_number[number].node_id, piece=piece, hand_on=packed, is_there=True)
                )
            if told:
                self._started(piece, sum(told.values()))
        return sends

    def _left_to_hub(self, piece: int, uncovered: int, now: float) -> int:
        """Return, as a bit mask, the `uncovered` nodes that must get the piece from the hub. No linked node that has
        the piece, or will get it, can pass it on to these nodes."""
        left = 0
        coming = (~self._missing[piece] | self._covered[piece]) & self._owners
        for member in self._each(uncovered):
            holders = self._each(member.reach & coming)
            if (
                member.is_slow
                or member.overdue
                or not any(one.path.proven and one.path.benched_until <= now for one in holders)
            ):
                left |= member.bit
        return left


def _to_be_trusted(owners: list[Member]) -> list[Member]:
    """Return those of `owners` that may get a further piece to hand on. A proven owner (`Path.proven`: it confirms
    pieces and hands them on in time) may always get one. While some owner is proven, an unproven one gets a single
    piece at a time, as a trial. If none is proven, all may get one.
    """
    proven = any(owner.path.proven for owner in owners)
    return [owner for owner in owners if not proven or owner.path.proven or not owner.path.relay.bytes_in_flight]
