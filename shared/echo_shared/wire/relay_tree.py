"""Forwarding route of a piece: a tree of nodes, packed into three bytes per node.

    node 7 receives the piece and forwards it to 3 and 9; 9 forwards it to 2
    pack([(3, 0, b""), (9, 1, pack([(2, 0, b"")]))]) == 3·0 9·1 2·0    number·children, parents before children
    split(3·0 9·1 2·0) == [(3, b""), (9, 2·0)]                         node 7 sends 9 the subtree below 9

The hub numbers its nodes. A number takes two bytes, little-endian, and a count of children one byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from echo_shared.errors import CodecError

NODE_BYTES: Final = 3
"""Bytes that one node takes in the encoded tree: two for its number, one for its number of children. The receiver of
the tree is not in it.
"""


def pack(branches: Iterable[tuple[int, int, bytes]]) -> bytes:
    """Encode sibling nodes, each given as (number, count of children, encoded subtree below it)."""
    return b"".join([number.to_bytes(2, "little") + bytes((count,)) + below for number, count, below in branches])


def pack_all(number: int, children: Mapping[int, Sequence[int]]) -> bytes:
    """Encode all nodes below node `number`. `children` maps a node to its children."""
    nodes: list[int] = []
    waiting = list(reversed(children.get(number, ())))
    while waiting:
        node = waiting.pop()
        below = children.get(node, ())
        nodes.append(node | len(below) << 16)
        waiting.extend(reversed(below))
    return b"".join([node.to_bytes(NODE_BYTES, "little") for node in nodes])


def split(packed: bytes) -> list[tuple[int, bytes]]:
    """Return the nodes at the top level, each with its encoded subtree. Raises CodecError if `packed` is cut off."""
    branches: list[tuple[int, bytes]] = []
    start = 0
    while start < len(packed):
        end = _end(packed, start)
        branches.append((int.from_bytes(packed[start : start + 2], "little"), packed[start + NODE_BYTES : end]))
        start = end
    return branches


def _end(packed: bytes, start: int) -> int:
    """Return the end offset of the node at `start`, including its subtree."""
    open_nodes = 1
    while open_nodes:
        if start + NODE_BYTES > len(packed):
            raise CodecError("A piece's route is cut off.", got=f"{len(packed)} bytes")
        open_nodes += packed[start + 2] - 1
        start += NODE_BYTES
    return start
