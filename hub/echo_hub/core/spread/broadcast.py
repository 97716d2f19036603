"""Which piece of an artefact goes to which node next, and who hands it on: the peer-assisted broadcast's plan.

Four pieces for nodes a and b, which have a link to each other, and c, which has a link to nobody:

    first      hub → a   pieces 0 and 2, to hand on      hub → b   pieces 1 and 3, to hand on
    then       hub → c   all four pieces, directly
    meanwhile  a → b     pieces 0 and 2                  b → a     pieces 1 and 3

Eight pieces cross the hub's uplink and not twelve. If a left, or were slow, b would get pieces 0 and 2 from the hub.

All have it soonest when no uplink idles, neither the hub's nor a node's, and no piece crosses the hub's uplink twice
before the nodes' uplinks are busy (Kumar and Ross, Peer-Assisted File Distribution: The Minimum Distribution Time,
2006). So, in this order, for as long as the hub's uplink has room:

1. An *owned* piece goes to one node, which hands it on to all it is linked with, where that node's relay work is short.
2. Pieces that a node gets from nobody else go to it *directly*.
3. When every owner has relay work enough and the uplink is about to idle, a piece goes directly to all who want it.
4. When no fresh piece is left, the hub *helps*: it sends what would arrive by its owner later than from the hub.

What a node was to get from an owner that left, is late or has lost its link, goes back to 1 or 2. A node that lags
behind holds up nobody: owners' work counts as done once all others have it.

Nothing here believes a node more than concerns that node: one that claims pieces it lacks does without them, one that
never hands on is benched for longer each time, in later broadcasts too, and then has to prove itself with one piece at
a time, as does one that never confirmed any. A link counts when both ends claim it.

Sets of nodes are bit masks: a member has a bit, and reuses a free one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from statistics import fmean
from typing import Final

from echo_hub.core.spread.members import Member, Relay
from echo_hub.core.spread.windows import FIRST_PUSH_BYTES, Paths

LEAST_PIECES: Final = 2
"""Every window lets so many pieces through: one that is under way, and one that comes after it."""

LEAST_RELAY_BYTES: Final = 128 * 1024
"""Relay work for an owner that has shown little of what it can do: a direct copy costs the hub as much as many."""

SPARE_SLACK_S: Final = 0.17
"""Queue at the hub's uplink below which it is about to idle."""

MOST_TRIED: Final = 16
"""Pieces for which an owner is looked for at once."""

CHECK_S: Final = 0.1
"""Seconds between looks at what is late."""

OVERDUE_S: Final = 0.5
"""A piece that is on its way for longer is held up beyond the hub's uplink, and takes no room there."""

FEW: Final = 4
"""One node of every four may lag behind without being waited for."""

STRAGGLER_S: Final = 0.3
LONE_STRAGGLER_S: Final = 0.6
"""The same as STRAGGLER_S, where one node is more than one of FEW."""
LATE_S: Final = 2.0
LATE_DELAYS: Final = 4
"""A piece that is handed on for longer than LATE_S and this many usual delays comes from the hub."""

LONGEST_BENCH_S: Final = 60.0
GIVE_UP_S: Final = 10.0
"""A node that says nothing for this long, with pieces on their way to it, has turned elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """One piece to one node."""

    node_id: str
    piece: int
    hand_on: bool


class Broadcast:
    """The broadcast of one artefact. Broadcasts at the same time share `paths`, so the one that is asked first has its
    way."""

    def __init__(self, *, paths: Paths, num_pieces: int, piece_bytes: int) -> None:
        self._paths = paths
        self._num_pieces = num_pieces
        self._piece_bytes = piece_bytes
        self._least_bytes = LEAST_PIECES * piece_bytes
        self._least_relay_bytes = max(2 * self._least_bytes, LEAST_RELAY_BYTES)
        self._members: dict[str, Member] = {}
        self._turned_away: set[str] = set()
        self._by_bit: dict[int, Member] = {}
        self._owners = 0
        """Members that may own pieces."""
        self._missing = [0] * num_pieces
        """For each piece, who lacks it."""
        self._covered = [0] * num_pieces
        """For each piece, who lacks it and has it coming: from the hub, now or in its turn, or from an owner."""
        self._next_fresh = 0
        """Pieces from here on were not sent to anybody."""
        self._rest: dict[int, None] = {}
        """Pieces that were sent to somebody, and that somebody else lacks who does not have them coming."""
        self._rest_changed = False
        self._relays: dict[int, list[Relay]] = {}
        self._uncovered_once: set[int] = set()
        """Pieces that an owner was to hand on and that may still come from it when the hub has sent them."""
        self._lagging = 0
        self._usual_relay_rate = 0.0
        self._links_seen = -1
        self._check_at = 0.0

    @property
    def done(self) -> bool:
        """Nobody lacks anything."""
        return not any(member.num_missing for member in self._members.values())

    def join(self, node_id: str, *, hand_on: bool, now: float, have: Collection[int] = ()) -> None:
        """A node wants the pieces; `hand_on`: it may be asked to hand pieces on. One that is in already stays."""
        if node_id in self._members or node_id in self._turned_away:
            return
        bit = 1
        while bit in self._by_bit:
            bit <<= 1
        wanted = sorted(set(range(self._num_pieces)).difference(have))
        member = Member(node_id, bit, self._paths[node_id], len(wanted), heard_at=now)
        self._members[node_id] = self._by_bit[bit] = member
        if hand_on:
            self._owners |= bit
        for piece in wanted:
            self._missing[piece] |= bit
            if piece < self._next_fresh:
                self._want_source(piece)
        self._links_seen = -1

    def leave(self, node_id: str, now: float) -> None:
        """The node is gone; what it was to hand on comes from elsewhere. It may join again."""
        self._turned_away.discard(node_id)
        if node_id in self._members:
            self._remove(self._members[node_id], now)

    def _remove(self, member: Member, now: float) -> None:
        del self._members[member.node_id]
        for piece in list(member.flights):
            self._landed(member, piece, None)
        for relay in list(member.relays.values()):
            self._end(relay)
        bit = member.bit
        del self._by_bit[bit]
        self._owners &= ~bit
        for piece in range(self._num_pieces):
            self._missing[piece] &= ~bit
            self._covered[piece] &= ~bit
        for relays in list(self._relays.values()):
            for relay in list(relays):
                self._received(relay, bit, now)
        self._links_seen = -1

    def turn_away(self, node_id: str, now: float) -> None:
        """The node wants no more from the hub, and joins no more. What it has whole, it may still be handing on."""
        self._turned_away.add(node_id)
        member = self._members.get(node_id)
        if member is not None and member.num_missing:
            self._remove(member, now)

    def end(self, now: float) -> None:
        """From here on nobody gets any more pieces."""
        for member in list(self._members.values()):
            self._remove(member, now)

    def have(self, node_id: str, pieces: Iterable[int], now: float) -> None:
        """The node has these, from wherever."""
        member = self._members.get(node_id)
        if member is None:
            return
        bit = member.bit
        for piece in pieces:
            if piece >= self._num_pieces or not self._missing[piece] & bit:
                continue
            self._missing[piece] &= ~bit
            self._covered[piece] &= ~bit
            member.num_missing -= 1
            member.heard_at = now
            relays = list(self._relays.get(piece, ()))
            if piece in member.flights:
                # Where it may have come from an owner, its time says nothing about the hub's uplink.
                doubtful = piece in self._uncovered_once or any(relay.waiting & bit for relay in relays)
                self._landed(member, piece, None if doubtful else now)
            for relay in relays:
                self._received(relay, bit, now)

    def left_of(self, send: Send) -> Send | None:
        """What there is still to do of it: None when the node has the piece and nobody waits for it to hand it on."""
        member = self._members.get(send.node_id)
        if member is None or (send.piece not in member.flights and send.piece not in member.relays):
            return None
        return replace(send, hand_on=send.hand_on and send.piece in member.relays)

    def plan(self, now: float) -> list[Send]:
        """What to send now. To be asked again after every event, and after CHECK_S without one."""
        if self._links_seen != self._paths.links_changed:
            self._look_at_links(now)
        self.check(now)
        self._look_at_rates()
        sends: list[Send] = []
        while self._paths.uplink.has_room(max(self._least_bytes, FIRST_PUSH_BYTES)):
            if self._rest_changed:
                self._settle_rest(now)
            send = self._owned(now) or self._direct(now) or self._spare(now) or self._help(now)
            if send is None:
                break
            sends.append(send)
        return sends

    # What to send.

    def _owned(self, now: float) -> Send | None:
        """The oldest piece that wants an owner, to the owner that will have handed it on first."""
        for piece in self._wanting_owner():
            uncovered = self._missing[piece] & ~self._covered[piece]
            owners = _to_be_trusted(self._eligible(uncovered, now))
            owners = [m for m in owners if m.path.relay.has_room(self._least_relay_bytes)]
            ready = [m for m in owners if m.path.push.has_room(self._least_bytes)]
            if ready:
                owner = min(ready, key=self._relayed_in_s)
                return self._hand_to(owner, piece, uncovered, now)
        return None

    def _relayed_in_s(self, owner: Member) -> tuple[float, int]:
        """Seconds until the owner would have handed on one more piece, and the bytes that it hands on until then."""
        work = owner.path.relay.bytes_in_flight + self._piece_bytes
        rate = self._relay_rate(owner)
        return (work / rate if rate else 0.0, work)

    def _relay_rate(self, owner: Member) -> float | None:
        """Bytes per second that it hands on. Of one that never had all the work that it may have, at least so much as
        the others on average, or as the best of them where that is so of all."""
        relay = owner.path.relay
        return relay.rate if relay.kept_full else max(relay.rate or 0.0, self._usual_relay_rate) or None

    def _look_at_rates(self) -> None:
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
        """Who may own a piece: through whom two nodes get it at least, and half as many as through the best."""
        reached = [
            (((m.reach | m.bit) & uncovered).bit_count(), m)
            for m in self._members.values()
            if m.bit & uncovered & self._owners and m.path.benched_until <= now
        ]
        most = max((count for count, _ in reached), default=0)
        return [m for count, m in reached if count >= 2 and 2 * count >= most]

    def _hand_to(self, owner: Member, piece: int, uncovered: int, now: float) -> Send:
        asked = owner.reach & uncovered
        window = owner.path.relay
        relay = Relay(owner, piece, now, now + window.delay + self._relayed_in_s(owner)[0], asked, asked)
        owner.relays[piece] = relay
        window.sent(self._piece_bytes, now)
        self._relays.setdefault(piece, []).append(relay)
        self._started(piece, asked | owner.bit)
        return self._send(owner, piece, now, hand_on=True)

    def _started(self, piece: int, covered: int) -> None:
        """`covered` have it coming now."""
        self._covered[piece] |= covered
        if piece == self._next_fresh:
            self._next_fresh += 1
        if self._missing[piece] & ~self._covered[piece]:
            self._want_source(piece)
        else:
            self._rest.pop(piece, None)

    def _want_source(self, piece: int) -> None:
        self._rest[piece] = None
        self._rest_changed = True

    def _settle_rest(self, now: float) -> None:
        """What no owner would bring to two nodes goes to each directly."""
        self._rest_changed = False
        for piece in list(self._rest):
            uncovered = self._missing[piece] & ~self._covered[piece]
            if not self._eligible(uncovered, now):
                self._queue_directly(piece, uncovered)

    def _queue_directly(self, piece: int, nodes: int) -> None:
        for member in self._each(nodes):
            member.direct.append(piece)
        self._started(piece, nodes)

    def _direct(self, now: float) -> Send | None:
        """The next piece of the node with the least on its way."""
        ready = [m for m in self._members.values() if self._next_direct(m) and m.path.push.has_room(self._least_bytes)]
        if not ready:
            return None
        member = min(ready, key=lambda m: m.path.push.bytes_in_flight)
        return self._send(member, member.direct.popleft(), now, hand_on=False)

    def _next_direct(self, member: Member) -> bool:
        """Whether a piece waits to go to it directly; drops those that it has got meanwhile."""
        while member.direct and not self._missing[member.direct[0]] & member.bit:
            member.direct.popleft()
        return bool(member.direct)

    def _spare(self, now: float) -> Send | None:
        """The next piece for all who want it, when no owner can take it and the uplink would idle otherwise."""
        piece, uplink = next(self._wanting_owner(), None), self._paths.uplink
        if piece is None or uplink.bytes_in_flight >= uplink.size(self._least_bytes, SPARE_SLACK_S):
            return None
        if self._has_owners(piece, now) and FEW * self._num_queued() > len(self._members):
            return None  # An owner may have room before the last such piece has even left.
        self._queue_directly(piece, self._missing[piece] & ~self._covered[piece])
        return self._direct(now)

    def _has_owners(self, piece: int, now: float) -> bool:
        return bool(self._eligible(self._missing[piece] & ~self._covered[piece], now))

    def _num_queued(self) -> int:
        """Members that pieces wait for, those that take none left out."""
        return sum(self._next_direct(member) and not member.overdue for member in self._members.values())

    def _help(self, now: float) -> Send | None:
        """What comes by its owner last, when it comes from the hub sooner."""
        if next(self._wanting_owner(), None) is not None:
            return None
        uplink = self._paths.uplink
        latest = 0.0
        if uplink.rate:
            latest = uplink.delay + (uplink.bytes_in_flight + self._piece_bytes) / uplink.rate
        chosen: tuple[Relay, Member] | None = None
        for owner in self._members.values():
            oldest = next(iter(owner.relays.values()), None)
            # What is assumed of an owner holds for as long as it keeps it.
            is_late = oldest is not None and not now <= oldest.due_at < float("inf")
            rate = owner.path.relay.rate if is_late else self._relay_rate(owner)
            each_s = self._piece_bytes / rate if rate else float("inf")
            for place, relay in enumerate(owner.relays.values(), start=1):
                left_s = max(place * each_s, now - relay.due_at)  # What is late may be late for as long again.
                if left_s > latest and (member := self._helpable(relay)) is not None:
                    latest, chosen = left_s, (relay, member)
        if chosen is None:
            return None
        relay, member = chosen
        relay.helped = True
        return self._send(member, relay.piece, now, hand_on=False)

    def _helpable(self, relay: Relay) -> Member | None:
        """A node that waits for the relayed piece and could have it from the hub."""
        for member in self._each(relay.waiting):
            if relay.piece not in member.flights and member.path.push.has_room(self._least_bytes):
                return member
        return None

    def _send(self, member: Member, piece: int, now: float, *, hand_on: bool) -> Send:
        if not member.flights:
            member.heard_at = now
        member.flights[piece] = now
        member.path.push.sent(self._piece_bytes, now)
        self._paths.uplink.sent(self._piece_bytes, now)
        return Send(node_id=member.node_id, piece=piece, hand_on=hand_on)

    # What has become of it.

    def _landed(self, member: Member, piece: int, now: float | None) -> None:
        """The piece is no longer on its way to the member; it arrived `now`, or nobody knows when."""
        sent_at = member.flights.pop(piece)
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

    def _received(self, relay: Relay, bit: int, now: float) -> None:
        """The member of this bit waits for the relayed piece no more."""
        relay.waiting &= ~bit
        self._free(relay, now)
        if not relay.waiting:
            self._end(relay)

    def _free(self, relay: Relay, now: float) -> None:
        """The owner has room for another piece once all that do not lag behind have this one."""
        if not relay.counts or relay.waiting & ~self._lagging or self._missing[relay.piece] & relay.owner.bit:
            return
        relay.counts = False
        relay.owner.path.num_late = 0
        if relay.helped:
            relay.owner.path.relay.lost(self._piece_bytes)
        else:
            relay.owner.path.relay.arrived(self._piece_bytes, now - relay.since, now)

    def _end(self, relay: Relay) -> None:
        """Nothing more is expected of the owner; who still waits needs another source."""
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
            if piece not in member.flights:
                self._covered[piece] &= ~member.bit
                self._want_source(piece)
                self._uncovered_once.add(piece)

    # What is late.

    def check(self, now: float) -> None:
        """Looks, at most every CHECK_S, for what is late. `plan` does it too; of several broadcasts all come first, so
        that the room that what is held up has taken goes to the one that is asked first."""
        if now < self._check_at:
            return
        self._check_at = now + CHECK_S
        self._rest_changed = True  # Who may own a piece changes with time.
        for member in list(self._members.values()):
            if member.flights and now - member.heard_at > GIVE_UP_S:
                self._bench(member, now)
                self.turn_away(member.node_id, now)
                continue
            for piece, sent_at in member.flights.items():
                if now - sent_at > OVERDUE_S and piece not in member.overdue:
                    member.overdue.add(piece)
                    self._paths.uplink.lost(self._piece_bytes)
        relays = [relay for relays in self._relays.values() for relay in relays]
        self._lagging = sum(m.bit for m in self._members.values() if m.overdue and not m.path.proven)
        for relay in relays:
            asked, waits_s = relay.asked.bit_count(), now - relay.since
            few = asked // FEW or int(asked > 1 and waits_s > LONE_STRAGGLER_S)
            if waits_s > STRAGGLER_S and relay.waiting.bit_count() <= few:
                self._lagging |= relay.waiting
        for relay in relays:
            self._free(relay, now)
            delay = relay.owner.path.relay.delay
            if now - relay.since > max(LATE_S, LATE_DELAYS * delay if delay < float("inf") else 0.0):
                self._too_late(relay, now)

    def _too_late(self, relay: Relay, now: float) -> None:
        owner = relay.owner
        if 2 * relay.waiting.bit_count() > relay.asked.bit_count() or self._missing[relay.piece] & owner.bit:
            self._bench(owner, now)
        self._end(relay)

    def _bench(self, owner: Member, now: float) -> None:
        if (path := owner.path).benched_until <= now:
            path.num_late += 1
            path.benched_until = now + min(2.0**path.num_late, LONGEST_BENCH_S)

    def _look_at_links(self, now: float) -> None:
        """Works out anew who reaches whom; due after links changed, and after members came or left."""
        self._links_seen = self._paths.links_changed
        for member in self._members.values():
            peers = (self._members.get(peer) for peer in member.path.links)
            member.reach = 0
            for peer in peers:
                if peer is not None and peer is not member and member.node_id in peer.path.links:
                    member.reach |= peer.bit
        for relay in [relay for relays in self._relays.values() for relay in relays]:
            lost = relay.waiting & ~relay.owner.reach
            if lost:
                self._received(relay, lost, now)
                self._uncover(relay.piece, lost)

    def _each(self, nodes: int) -> Iterator[Member]:
        while nodes:
            bit = nodes & -nodes
            nodes ^= bit
            yield self._by_bit[bit]


def _to_be_trusted(owners: list[Member]) -> list[Member]:
    """Beside owners that have proven themselves, the others prove themselves with one piece at a time."""
    proven = any(owner.path.proven for owner in owners)
    return [owner for owner in owners if not proven or owner.path.proven or not owner.path.relay.bytes_in_flight]
