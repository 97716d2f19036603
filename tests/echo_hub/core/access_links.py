"""Simulate broadcasts from a hub to nodes in virtual time, where only the hosts' own uplinks and downlinks limit the
rate.

An uplink serves its connections in turn, one packet each, like TCP's fair share. The hub's uplink serves all
connections at once, a node's at most `SENDING_AT_ONCE`, starting with the pieces that most nodes wait for. A downlink
is a queue. Buffers are unlimited: nothing is lost, delays grow. Computing takes no time. A `Have` message (a node's
report of its pieces) takes the links' delay, but no bandwidth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from itertools import count

from echo_hub.spread.broadcast import CHECK_S, Broadcast, SendPiece
from echo_hub.spread.windows import BroadcastPaths
from echo_shared.wire.relay_tree import split

PACKET_BYTES = 8 * 1024
SENDING_AT_ONCE = 4
HAVE_EVERY_S = 0.005
PAUSE_S = 20.0
MBIT = 1e6 / 8


@dataclass(kw_only=True)
class Host:
    """A host with its links; `up` and `down` are in bytes per second, and `delay_s` is the delay of one direction."""

    up: float
    down: float
    delay_s: float = 0.002
    links: set[int] | None = None
    """Hosts that this host has a link to; None means all hosts."""
    hands_on_to: set[int] | None = None
    """Hosts that receive the pieces it relays; None means all linked ones."""
    joins_at: float = 0.0
    dies_at: float = float("inf")
    lies: Callable[[int], tuple[int, ...]] | None = None
    """If set, return the pieces that the host claims to hold after it receives the given piece."""


@dataclass
class _Uplink:
    rate: float
    queues: dict[int, deque[tuple[SendPiece, int, int]]] = field(default_factory=dict)
    """By receiver: the messages to send, and the bytes left of the first one."""
    turns: deque[int] = field(default_factory=deque)
    waiting: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Receivers that wait for one of the host's `SENDING_AT_ONCE` turns, with their places in the queue."""
    number: int = 0
    busy: bool = False
    sent_bytes: int = 0


class Network:
    """A network in which `run` broadcasts `size` bytes from host 0, the hub. Afterwards `got` holds each piece's
    arrival time at each host.
    """

    def __init__(self, hosts: list[Host], *, size: int, piece_bytes: int, after: Network | None = None) -> None:
        """`after`: an earlier network, from which the hub keeps its measurements of the links."""
        self.now = self.began = after.now + PAUSE_S if after else 0.0
        self.hosts = hosts
        self.num_pieces = -(-size // piece_bytes)
        self.piece_bytes = piece_bytes
        self.paths = after.paths if after else BroadcastPaths()
        self.broadcast = Broadcast(paths=self.paths, num_pieces=self.num_pieces, piece_bytes=piece_bytes)
        self.got: list[dict[int, float]] = [{} for _ in hosts]
        self.duplicates = 0
        self.directs = 0
        self.num_joined = 0
        self.dead: set[int] = set()
        self._uplinks = [_Uplink(host.up) for host in hosts]
        self._down_free_at = [0.0] * len(hosts)
        self._fresh: list[list[int]] = [[] for _ in hosts]
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self._hub_is_to_plan = False

    def at(self, when: float, action: Callable[[], None]) -> None:
        heappush(self._events, (when, next(self._order), action))

    def linked(self, one: int, other: int) -> bool:
        mine, theirs = self.hosts[one].links, self.hosts[other].links
        return (mine is None or other in mine) and (theirs is None or one in theirs)

    def run(self, *, until: float = 3_600.0) -> float:
        """Return the seconds until every live host has all pieces. Stop early when no event is left, or at `until`."""
        for number, host in enumerate(self.hosts):
            if number:
                self.at(self.began + host.joins_at, partial(self._join, number))
                if host.dies_at < until:
                    self.at(self.began + host.dies_at, partial(self._die, number))
        self.at(self.began, self._wake)
        while self._events and self.now < self.began + until:
            self.now, _, action = heappop(self._events)
            action()
            if self.num_joined == len(self.hosts) - 1 and self.broadcast.done:
                break
        return self.took_s(number for number in range(1, len(self.hosts)) if number not in self.dead)

    def took_s(self, numbers: Iterable[int]) -> float:
        return max((when - self.began for number in numbers for when in self.got[number].values()), default=0.0)

    def _join(self, number: int) -> None:
        peers = (n for n in range(1, len(self.hosts)) if n != number and self.linked(n, number))
        self.paths.set_links(f"n{number}", [f"n{n}" for n in peers])
        self.num_joined += 1
        self.broadcast.join(f"n{number}", hand_on=True, now=self.now)
        self._plan()

    def _die(self, number: int) -> None:
        self.dead.add(number)
        self.broadcast.leave(f"n{number}", self.now)
        self.paths.forget(f"n{number}")
        self._plan()

    def _wake(self) -> None:
        self._plan_now()
        self.at(self.now + CHECK_S, self._wake)

    def _plan(self) -> None:
        if not self._hub_is_to_plan:
            self._hub_is_to_plan = True
            self.at(self.now, self._plan_now)

    def _plan_now(self) -> None:
        self._hub_is_to_plan = False
        for send in self.broadcast.plan(self.now):
            number = int(send.node_id[1:])
            if send.is_there:
                delay_s = self.hosts[0].delay_s + self.hosts[number].delay_s
                self.at(self.now + delay_s, partial(self._hand_on, number, send))
            else:
                self.directs += not send.hand_on
                self._transmit(0, number, send)

    def _transmit(self, source: int, target: int, send: SendPiece) -> None:
        uplink = self._uplinks[source]
        queue = uplink.queues.setdefault(target, deque())
        if not queue:
            self._line_up(source, target, send, uplink.number)
        queue.append((send, self.piece_bytes, uplink.number))
        uplink.number += 1
        if not uplink.busy:
            self._next_packet(source)

    def _next_packet(self, source: int) -> None:
        uplink = self._uplinks[source]
        packet = self._packet(source)
        uplink.busy = packet is not None
        if packet is None:
            return
        target, send, size, is_last = packet
        uplink.sent_bytes += size
        gone_at = self.now + size / uplink.rate
        self.at(gone_at, lambda: self._next_packet(source))
        there_at = gone_at + self.hosts[source].delay_s + self.hosts[target].delay_s
        self.at(there_at, lambda: self._enter(source, target, send, size, is_last))

    def _line_up(self, source: int, target: int, send: SendPiece, number: int) -> None:
        uplink = self._uplinks[source]
        if source:
            uplink.waiting[target] = -len(send.hand_on), number
        else:
            uplink.turns.append(target)

    def _packet(self, source: int) -> tuple[int, SendPiece, int, bool] | None:
        """Return the next packet: receiver, piece, bytes, and True for the piece's last packet. The hub skips queued
        pieces that the receiver has got meanwhile.
        """
        uplink = self._uplinks[source]
        while (uplink.turns or uplink.waiting) and source not in self.dead:
            while uplink.waiting and len(uplink.turns) < SENDING_AT_ONCE:
                first = min(uplink.waiting, key=lambda one: uplink.waiting[one])
                del uplink.waiting[first]
                uplink.turns.append(first)
            target = uplink.turns.popleft()
            queue = uplink.queues[target]
            send, left, number = queue.popleft()
            is_useless = source == 0 and left == self.piece_bytes and self.broadcast.left_of(send) is None
            size = min(left, PACKET_BYTES)
            if left > size and not is_useless:
                queue.appendleft((send, left - size, number))
                uplink.turns.append(target)
            elif queue:
                self._line_up(source, target, queue[0][0], queue[0][2])
            if not is_useless:
                return target, send, size, left == size
        return None

    def _enter(self, source: int, target: int, send: SendPiece, size: int, is_last: bool) -> None:
        free_at = max(self.now, self._down_free_at[target]) + size / self.hosts[target].down
        self._down_free_at[target] = free_at
        if is_last:
            self.at(free_at, lambda: self._receive(source, target, send))

    def _receive(self, source: int, number: int, send: SendPiece) -> None:
        if number in self.dead:
            return
        host = self.hosts[number]
        if send.piece in self.got[number]:
            self.duplicates += 1
        else:
            self.got[number][send.piece] = self.now
            self._claim(number, (send.piece,) if host.lies is None else host.lies(send.piece))
        self._hand_on(number, send)

    def _hand_on(self, number: int, send: SendPiece) -> None:
        host = self.hosts[number]
        if number in self.dead or send.piece not in self.got[number]:
            return
        for one, below in split(send.hand_on):
            peer = int((self.paths.named(one) or "n0")[1:])
            reached = host.hands_on_to is None or peer in host.hands_on_to
            if peer and peer not in self.dead and reached and self.linked(number, peer):
                self._transmit(number, peer, SendPiece(node_id=f"n{peer}", piece=send.piece, hand_on=below))

    def _claim(self, number: int, pieces: tuple[int, ...]) -> None:
        if not self._fresh[number]:
            delay_s = HAVE_EVERY_S + self.hosts[0].delay_s + self.hosts[number].delay_s
            self.at(self.now + HAVE_EVERY_S, lambda: self._tell(number, delay_s - HAVE_EVERY_S))
        self._fresh[number].extend(pieces)

    def _tell(self, number: int, delay_s: float) -> None:
        pieces, self._fresh[number] = self._fresh[number], []
        self.at(self.now + delay_s, lambda: self._hear(number, pieces))

    def _hear(self, number: int, pieces: list[int]) -> None:
        self.broadcast.have(f"n{number}", pieces, self.now)
        self._plan()


def fleet(*, hub_mbit: float, nodes: int, up_mbit: float, down_mbit: float = 100, delay_s: float = 0.002) -> list[Host]:
    hub = Host(up=hub_mbit * MBIT, down=1e9 / 8, delay_s=delay_s)
    return [hub, *(Host(up=up_mbit * MBIT, down=down_mbit * MBIT, delay_s=delay_s) for _ in range(nodes))]


def bound_s(hosts: list[Host], size: int) -> float:
    """Return a lower bound on the broadcast time under any plan (Kumar and Ross, 2006)."""
    hub, nodes = hosts[0], hosts[1:]
    up = hub.up + sum(node.up for node in nodes)
    return max(size / hub.up, size / min(node.down for node in nodes), len(nodes) * size / up)
