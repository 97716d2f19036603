"""Make nodes that broke the protocol wait before they connect again: one second, doubled with each fault.

A fault counts for the node that provably caused it and also for its address, because a new key costs nothing. Several
nodes may share an address, so the wait of an address stays short, and nodes that have behaved well are exempt from the
address's wait. Loopback addresses never wait: all clients of an untrusted local proxy have that address. Everything is
in memory and bounded; the oldest faults are forgotten first.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from echo_shared.errors import RefusedError
from echo_shared.wire.messages import RefusalCode
from echo_shared.wire.sockets import is_loopback

FIRST_S: Final = 1.0
LONGEST_S: Final = 600.0
"""Longest wait of a node, in seconds."""
LONGEST_OF_ADDRESS_S: Final = 30.0
FORGOTTEN_AFTER_S: Final = 1_800.0
"""Seconds without another fault after which a node's or address's faults are forgotten."""
MOST_KNOWN: Final = 4_096
"""Maximum number of nodes with faults kept in memory, and of addresses."""
MOST_TRUSTED: Final = 16_384
"""Maximum number of well-behaved nodes kept in memory."""


class Fault(StrEnum):
    """A fault of a node on an open connection. Honest nodes commit only the faults in `HARMLESS`."""

    TOO_LARGE = "too_large"
    BAD_WEBSOCKET = "bad_websocket"
    NOT_BINARY = "not_binary"
    NOT_DECODABLE = "not_decodable"
    OUT_OF_TURN = "out_of_turn"
    TOO_MANY_FRAMES = "too_many_frames"
    """The node sent too many pings, pongs, empty frames or fragments, or messages faster than the hub reads them."""
    TOO_FAST = "too_fast"
    """The node exceeded its rate, so the hub paused reading from it."""
    SILENT = "silent"
    NOT_READING = "not_reading"


HARMLESS: Final = frozenset({Fault.TOO_FAST, Fault.SILENT, Fault.NOT_READING})
"""Faults without a penalty, because slow machines, bad connections and closed laptop lids cause them as well."""


@dataclass(frozen=True, slots=True)
class _Record:
    faults: int
    until: float
    """Time before which no connection of the node or address is accepted."""
    forgotten_at: float


class Penalties:
    """Faults and waits of nodes and addresses. `now` is a monotonic clock in seconds; all calls must use the same
    clock."""

    def __init__(self) -> None:
        self._nodes: OrderedDict[str, _Record] = OrderedDict()
        self._places: OrderedDict[str, _Record] = OrderedDict()
        self._trusted: OrderedDict[str, None] = OrderedDict()

    def behaved(self, node_id: str) -> None:
        """Mark the node as well behaved, because it has sent a valid message. A node with remembered faults is not
        marked."""
        if node_id not in self._nodes:
            self._trusted[node_id] = None
            self._trusted.move_to_end(node_id)
            if len(self._trusted) > MOST_TRUSTED:
                self._trusted.popitem(last=False)

    def fault(self, place: str, node_id: str = "", *, now: float) -> None:
        """Record a protocol violation from this address. `node_id`: the node that provably caused it; "" if none is
        proven."""
        if node_id:
            self._trusted.pop(node_id, None)
            _note(self._nodes, node_id, LONGEST_S, now)
        if not is_loopback(place):
            _note(self._places, place, LONGEST_OF_ADDRESS_S, now)

    def check(self, place: str, node_id: str, *, now: float) -> None:
        """Raise RefusedError if this node, or its address, must still wait before it connects."""
        of_place = 0.0 if node_id in self._trusted else _left(self._places, place, now)
        wait_s = max(_left(self._nodes, node_id, now), of_place)
        if wait_s > 0:
            raise RefusedError(
                "This node, or another node at its address, broke the protocol and must wait.",
                got=f"{wait_s:.0f} s to go",
                do="Upgrade the node if it is old; it tries again by itself.",
                code=RefusalCode.TOO_SOON,
            )


def _note(records: OrderedDict[str, _Record], key: str, longest_s: float, now: float) -> None:
    old = records.pop(key, None)
    faults = 1 + (old.faults if old is not None and now < old.forgotten_at else 0)
    wait_s = min(FIRST_S * 2 ** min(faults - 1, 20), longest_s)
    records[key] = _Record(faults, now + wait_s, now + FORGOTTEN_AFTER_S)
    if len(records) > MOST_KNOWN:
        records.popitem(last=False)


def _left(records: OrderedDict[str, _Record], key: str, now: float) -> float:
    return records[key].until - now if key in records else 0.0
