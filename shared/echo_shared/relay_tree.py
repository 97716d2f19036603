"""Who hands a piece on to whom, in three bytes a node.

    the piece comes to 7, which hands it on to 3 and 9; 9 hands it on to 2

    pack([(3, 0, b""), (9, 1, pack([(2, 0, b"")]))]) == 3·0 9·1 2·0    number·children, each before those below it
    split(3·0 9·1 2·0) == [(3, b""), (9, 2·0)]                         what 7 does: 9 gets what lies below 9

The hub numbers its nodes; a number is two bytes, little-endian, and how many children a node has is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from echo_shared.errors import CodecError

NODE_BYTES: Final = 3
"""Two bytes for a node's number, one for the count of its children: at most 255. The root itself is not packed."""


def pack(branches: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Nodes side by side, each with how many children it has and what is packed below it."""
    return b"".join([number.to_bytes(2, "little") + bytes((count,)) + below for number, count, below in branches])


def pack_all(number: int, children: Mapping[int, Sequence[int]]) -> bytes:
    """All that lies below this node. `children`: of each node that has any."""
    nodes: list[int] = []
    waiting = list(reversed(children.get(number, ())))
    while waiting:
        node = waiting.pop()
        below = children.get(node, ())
        nodes.append(node | len(below) << 16)
        waiting.extend(reversed(below))
    return b"".join([node.to_bytes(NODE_BYTES, "little") for node in nodes])


def split(packed: bytes) -> list[tuple[int, bytes]]:
    """The nodes at the top, each with what is packed below it. Raises CodecError."""
    branches: list[tuple[int, bytes]] = []
    start = 0
    while start < len(packed):
        end = _end(packed, start)
        branches.append((int.from_bytes(packed[start : start + 2], "little"), packed[start + NODE_BYTES : end]))
        start = end
    return branches


def _end(packed: bytes, start: int) -> int:
    """Where the node that begins there ends, with all that lies below it."""
    open_nodes = 1
    while open_nodes:
        if start + NODE_BYTES > len(packed):
            raise CodecError("A piece's way is cut off.", got=f"{len(packed)} bytes")
        open_nodes += packed[start + 2] - 1
        start += NODE_BYTES
    return start
