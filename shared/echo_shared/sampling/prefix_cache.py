"""Prefix caching, as in vLLM and SGLang: keep keys and values of sampled sequences for prompts that begin with them.

In an episode of several turns, each prompt is the previous one, its completion, and the environment's answer:

    turn 0   prompt            -> completion                    keys and values of all but the last token are kept
    turn 1   prompt completion observation -> completion        only the last token and the observation are computed

Kept states equal recomputed ones, up to rounding, only under the same policy version, so every sequence belongs to one
version.

Sequences are in the order of their bytes. The sequence that shares the most first tokens with a prompt is therefore
next to the prompt's place in this order.

Dimension: T tokens.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

State = TypeVar("State")

LEAST_SHARED: Final = 16
"""A cache that can cut sequences ignores a kept sequence that shares fewer first tokens than this with the prompt.
"""
LEAST_SHARE: Final = 8
"""A cache that can cut sequences ignores a kept sequence if less than 1 / LEAST_SHARE of the sequence is shared with
the prompt: some engines copy the whole sequence before they cut it.
"""
_ID_BYTES: Final = 4
_VERSION_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptKeys:
    """Memory and use of an engine's prefix cache."""

    kept_bytes: int = 0
    hits: int = 0
    """Number of prompts that began with a kept sequence."""
    tokens: int = 0
    """Number of prompt tokens that were not computed again."""

    def __add__(self, other: KeptKeys) -> KeptKeys:
        return KeptKeys(
            kept_bytes=self.kept_bytes + other.kept_bytes,
            hits=self.hits + other.hits,
            tokens=self.tokens + other.tokens,
        )


class PrefixCache(Generic[State]):
    """States of the newest sequences, of up to `max_tokens` tokens in total. The least recently used ones go first."""

    def __init__(self, max_tokens: int, *, cuts: bool = False) -> None:
        """`cuts`: True if the first part of a state can be used alone. Otherwise a prompt must begin with the whole
        sequence.
        """
        self.cuts = cuts
        self.max_tokens = max_tokens
        self.num_tokens = 0
        """Tokens of all kept sequences."""
        self.hits = 0
        self.reused_tokens = 0
        self._kept: dict[bytes, State] = {}
        """States by version and token ids, the least recently used first."""
        self._in_order: list[bytes] = []
        """All keys of `_kept`, sorted in ascending order."""

    def keep(self, ids_T: NDArray[np.int32], state: State, *, version: int = 0) -> None:
        """Store the state of a sequence. The caller must not modify it afterwards. A cache that cuts sequences drops
        every sequence with which another sequence begins.
        """
        if not 0 < len(ids_T) <= self.max_tokens:
            return
        key = _key(ids_T, version)
        if key in self._kept:
            self._drop(key)
        place = bisect.bisect_left(self._in_order, key)
        if self.cuts and place < len(self._in_order) and self._in_order[place].startswith(key):
            return
        while self.cuts and (inner := self._whole(key)) is not None:
            self._drop(inner)
        while self.num_tokens + len(ids_T) > self.max_tokens:
            self._drop(next(iter(self._kept)))
        self._kept[key] = state
        bisect.insort(self._in_order, key)
        self.num_tokens += len(ids_T)

    def shared(self, ids_T: NDArray[np.int32], *, version: int = 0) -> int:
        """Return for how many first tokens of this prompt `take` would find a kept state."""
        return self._find(ids_T, version)[0]

    def take(self, ids_T: NDArray[np.int32], *, version: int = 0) -> tuple[int, State | None]:
        """Find the kept sequence that shares the most first tokens with this prompt. Return the number of shared
        tokens, and the sequence's state; (0, None) if there is none. At least one token of the prompt is left to
        compute.
        """
        count, key = self._find(ids_T, version)
        if key is None:
            return 0, None
        # Move the key to the end of the dictionary: its state is now the most recently used one.
        state = self._kept[key] = self._kept.pop(key)
        return count, state

    def reused(self, num_tokens: int) -> None:
        """Add the tokens of one prompt that were not computed again to this cache's counts."""
        self.hits += num_tokens > 0
        self.reused_tokens += num_tokens

    def kept(self, token_bytes: int) -> KeptKeys:
        """Return the memory and use of this cache, whose states take `token_bytes` for each token."""
        return KeptKeys(kept_bytes=self.num_tokens * token_bytes, hits=self.hits, tokens=self.reused_tokens)

    def forget(self, version: int | None = None) -> None:
        """Drop the sequences of a version; None: of all versions."""
        if version is None:
            self.clear()
            return
        own = version.to_bytes(_VERSION_BYTES, "big")
        begin, end = bisect.bisect_left(self._in_order, own), bisect.bisect_left(self._in_order, _after(own))
        for key in self._in_order[begin:end]:
            self._drop(key)

    def clear(self) -> None:
        self._kept.clear()
        self._in_order.clear()
        self.num_tokens = 0

    def _find(self, ids_T: NDArray[np.int32], version: int) -> tuple[int, bytes | None]:
        sought = _key(ids_T[:-1], version)
        if not self.cuts:
            whole = sought if sought in self._kept else self._whole(sought)
            return (0, None) if whole is None else (_num_tokens(whole), whole)
        place = bisect.bisect_left(self._in_order, sought)
        near = self._in_order[max(0, place - 1) : place + 1]
        count, key = max(((_num_shared(key, sought), key) for key in near), default=(0, b""))
        if count < LEAST_SHARED or count * LEAST_SHARE < _num_tokens(key):
            return 0, None
        return count, key

    def _whole(self, sought: bytes) -> bytes | None:
        """Return the longest kept key that is a proper beginning of `sought` (shorter than `sought` itself); None if
        there is none.
        """
        place = bisect.bisect_left(self._in_order, sought)
        while place:
            key = self._in_order[place - 1]
            if sought.startswith(key):
                return key
            # A kept sequence that begins `sought` cannot be longer than the part that this neighbour shares with
            # `sought`.
            if not (count := _num_shared(key, sought)):
                return None
            sought = sought[: _VERSION_BYTES + _ID_BYTES * count]
            place = bisect.bisect_right(self._in_order, sought)
        return None

    def _drop(self, key: bytes) -> None:
        del self._kept[key]
        del self._in_order[bisect.bisect_left(self._in_order, key)]
        self.num_tokens -= _num_tokens(key)


def _key(ids_T: NDArray[np.int32], version: int) -> bytes:
    return version.to_bytes(_VERSION_BYTES, "big") + ids_T.astype("<i4").tobytes()


def _after(beginning: bytes) -> bytes:
    """Return the smallest key that sorts after all keys that start with `beginning`."""
    return (int.from_bytes(beginning, "big") + 1).to_bytes(_VERSION_BYTES, "big")


def _num_tokens(key: bytes) -> int:
    return (len(key) - _VERSION_BYTES) // _ID_BYTES


def _num_shared(one: bytes, other: bytes) -> int:
    """Return the number of first tokens that two keys of one version share; 0 for different versions."""
    if one[:_VERSION_BYTES] != other[:_VERSION_BYTES]:
        return 0
    length = min(len(one), len(other))
    ids, others = (np.frombuffer(key[_VERSION_BYTES:length], "<i4") for key in (one, other))
    differing = np.flatnonzero(ids != others)
    return int(differing[0]) if len(differing) else len(ids)
