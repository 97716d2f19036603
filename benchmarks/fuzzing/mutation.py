"""Mutations that keep the form of bytes: they change values in a MessagePack or JSON tree.

Blind mutations of bytes seldom pass the first check of a message; these mutations nearly always do.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any, Final

import msgpack

Blind = Callable[[bytes, int], bytes]
"""Mutates bytes in any way: (data, most bytes)."""

UNPACKED: Final = msgpack.UnpackException
_ODD: Final[tuple[Any, ...]] = (
    *(0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)),
    *(0.0, -0.0, 0.5, 1e-300, 1e308, math.inf, -math.inf, math.nan),
    *(True, False, None, "", "x", "x" * 300, "\0", "\u202e", "<b>", "../../x", "\ud7ff", b"", b"\0", b"\xff" * 64),
    *([], {}, [[]], [[[[[[]]]]]], {"": {}}, {"type": "hello"}, [0] * 100, [{}] * 10),
)


def frame(data: bytes, most: int, seed: int, blind: Blind) -> bytes:
    """Mutate a MessagePack frame."""
    return _changed(data, most, seed, blind, lambda raw: msgpack.unpackb(raw, strict_map_key=False), _packed)


def text(data: bytes, most: int, seed: int, blind: Blind) -> bytes:
    """Mutate a JSON document."""
    return _changed(data, most, seed, blind, json.loads, _written)


def _packed(tree: Any) -> bytes:
    packed: bytes = msgpack.packb(tree)
    return packed


def _written(tree: Any) -> bytes:
    return json.dumps(tree, default=repr).encode(errors="surrogatepass")


def _changed(
    data: bytes, most: int, seed: int, blind: Blind, read: Callable[[bytes], Any], write: Callable[[Any], bytes]
) -> bytes:
    chance = random.Random(seed)
    if chance.random() < 1 / 8:
        return blind(data, most)
    try:
        tree = read(data)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            tree = _with_a_change(tree, chance, blind)
            changed = write(tree)
            if len(changed) > most:  # One change can make the message many times as large.
                return blind(data, most)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError, UNPACKED):
        return blind(data, most)
    return changed


def _with_a_change(tree: Any, chance: random.Random, blind: Blind) -> Any:
    """Change the value at a random place of the tree."""
    if isinstance(tree, dict) and tree and chance.random() < 0.9:
        key = chance.choice(list(tree))
        kind = chance.random()
        if kind < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        if kind < 0.2:
            return {**tree, chance.choice(("x", "type", key)): deepcopy(chance.choice(_ODD))}
        return {**tree, key: _with_a_change(tree[key], chance, blind)}
    if isinstance(tree, list) and tree and chance.random() < 0.8:
        place = chance.randrange(len(tree))
        if chance.random() < 0.2:
            return tree[:place] + tree[place : place + 1] * chance.choice((0, 2, 65)) + tree[place + 1 :]
        return [*tree[:place], _with_a_change(tree[place], chance, blind), *tree[place + 1 :]]
    if isinstance(tree, bytes) and chance.random() < 0.7:
        return blind(tree, len(tree) + 8)
    return deepcopy(chance.choice(_ODD))
