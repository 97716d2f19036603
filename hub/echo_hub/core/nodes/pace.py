"""How fast one node draws, as the hub has measured it: from what came back, and when. Nothing here is claimed.

All figures forget what is long past (a memory of about `MEMORY` completions):

    token_s         seconds a token takes in one completion: how soon the next one can be back
    tokens_per_s    tokens of all its completions together while it has enough to do: with little to do it draws less
                    than it can, so the most that was seen counts, until it holds more than that and draws less; but no
                    more than as many completions at once come to at today's token_s
    takes           completions that keep it busy: those that it draws at once (by Little's law tokens_per_s · token_s),
                    those that are on their way there and back meanwhile or that it draws in .4 s, and a quarter more.
                    To give it more would only make them wait; where it could do with more, it is found to take more
                    each time

A node that draws 8 completions at once, each at 20 tokens a second, has token_s = 0.05 and tokens_per_s = 160.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Final

MEMORY: Final = 32
UNBOUNDED: Final = 2**30
_KEPT: Final = 1.0 - 1.0 / MEMORY
_KEPT_FULL: Final = 1.0 - 1.0 / 256
_KEPT_IDLE: Final = 1.0 - 1.0 / 8192
"""The most that was seen is forgotten that fast with each completion, if the node holds more than it is thought to draw
at once, and if it does not."""
_WAY_GROWS: Final = 1.01
"""The way there and back is the least of what was seen, which is forgotten that fast."""
_AHEAD: Final = 1.25
_AHEAD_S: Final = 0.4
"""What a node draws in so many seconds it may hold besides in any case: computers hold each other up at times."""
_NEARLY: Final = 0.1
"""What a node draws at once is measured, and so a little off: a round that it is short of by this is none,"""
_PLACE: Final = 0.25
"""and by so much it may be above a whole number of places."""


@dataclass(slots=True, eq=False)
class Pace:
    """Of a node that has returned nothing yet, all figures are 0: unknown."""

    token_s: float = 0.0
    tokens_per_s: float = 0.0
    takes: int = 0
    _counted_from: float = 0.0
    _num: float = 0.0
    _tokens: float = 0.0
    _drawn_s: float = 0.0
    _worked_s: float = 0.0
    _way_s: float = inf
    _most_at_once: float = 0.0
    """Completions drawn at once, on average over the memory; the most of late."""
    _most_per_s: float = 0.0
    """Tokens, likewise."""

    def begin(self, now: float) -> None:
        """It had no work, and gets some."""
        self._counted_from = now

    def arrived(self, num_tokens: int, *, sampling_s: float, latency_s: float, held: int, now: float) -> None:
        """A completion came in `latency_s` after it was leased, one of `held`; the node says that it took `sampling_s`
        to draw, which counts for no more than the latency."""
        spent_s, since_s = (sampling_s if sampling_s < latency_s else latency_s), now - self._counted_from
        self._counted_from = now
        self._num = num = self._num * _KEPT + 1.0
        self._tokens = tokens = self._tokens * _KEPT + num_tokens
        self._drawn_s = drawn_s = self._drawn_s * _KEPT + (spent_s if spent_s > 0.0 else 0.0)
        self._worked_s = worked_s = self._worked_s * _KEPT + (since_s if since_s > 0.0 else 0.0)
        if not tokens or not worked_s:
            return
        token_s = drawn_s / tokens
        kept = _KEPT_FULL if held > self._most_at_once else _KEPT_IDLE
        most_at_once, at_once = kept * self._most_at_once, drawn_s / worked_s
        most_per_s, per_s = kept * self._most_per_s, tokens / worked_s
        most_at_once = at_once if at_once > most_at_once else most_at_once
        most_per_s = per_s if per_s > most_per_s else most_per_s
        at_once_per_s = most_at_once / token_s if token_s else inf
        per_s = at_once_per_s if at_once_per_s < most_per_s else most_per_s
        way_s = min(_WAY_GROWS * self._way_s, max(0.0, latency_s - sampling_s))
        on_their_way = (way_s if way_s > _AHEAD_S else _AHEAD_S) * per_s * num / tokens
        self.token_s, self.tokens_per_s, self._way_s = token_s, per_s, way_s
        self._most_at_once, self._most_per_s = most_at_once, most_per_s
        self.takes = 1 + ceil(_AHEAD * (per_s * token_s + on_their_way))

    def missed(self, num_tokens: float, waited_s: float) -> None:
        """A completion likely to be so long has not come in `waited_s`: until one comes, it counts as half drawn."""
        if num_tokens:
            self.token_s = max(self.token_s, 2.0 * waited_s / num_tokens)

    def finish_s(self, queued_tokens: float, num_tokens: float) -> float:
        """Seconds until a completion of `num_tokens` is back, beside `queued_tokens` of others that the node holds: as
        long as it takes alone if it begins at once, and so much again for each round of others before it."""
        rounds = ceil((queued_tokens / num_tokens + 1.0) / self._at_once - _NEARLY) if num_tokens else 1
        return self.token_s * num_tokens * max(1, rounds) + self.way_s

    def fits(self, queued_tokens: float, num_tokens: float, in_s: float) -> int:
        """How many completions of `num_tokens` are back in `in_s` seconds, beside `queued_tokens` of others."""
        alone_s = self.token_s * num_tokens
        if not alone_s:
            return UNBOUNDED
        rounds = int((in_s - self.way_s) / alone_s)
        return max(0, int((rounds + _NEARLY) * self._at_once - queued_tokens / num_tokens)) if rounds > 0 else 0

    @property
    def _at_once(self) -> int:
        """Places that it has: with one in part it has a whole one, for who is given too little is never found to draw
        more."""
        return max(1, ceil(self.tokens_per_s * self.token_s - _PLACE))

    @property
    def way_s(self) -> float:
        """Seconds that a completion is under way, there and back, besides being drawn."""
        return self._way_s if self._way_s < inf else 0.0
