"""Measured sampling speed of one node, derived from arrival times and counts.

All figures are running averages or maxima over about the last `MEMORY` completions. A node may also claim a speed. The
hub then expects this speed, up to `RAMP` times the measured one, until a result comes later than the claim promises.

    token_s         seconds per token within one completion; determines how soon the next completion can be back
    tokens_per_s    tokens per second over all parallel completions, while the node is busy. An underused node samples
                    less than it can, so the highest recent value counts. The value decays faster on a node with queued
                    work. It never exceeds the observed parallelism divided by the current token_s
    takes           completions that the node should hold to stay busy: those sampled in parallel (Little's law:
                    tokens_per_s · token_s), plus those in transit meanwhile (at least those sampled in 0.4 s), plus a
                    quarter. More would only queue on the node. On a node with spare capacity the value grows with
                    each completion round

A node that samples 8 completions in parallel, each at 20 tokens a second, has token_s = 0.05 and tokens_per_s = 160.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, inf
from typing import Final

MEMORY: Final = 32
"""Number of completions over which a node's figures decay to 1/e. Set by hand."""
UNBOUNDED: Final = 2**30
"""A number of rollouts that no node reaches: it stands for "no limit"."""
_KEPT: Final = 1.0 - 1.0 / MEMORY
_KEPT_FULL: Final = 1.0 - 1.0 / 256
_KEPT_IDLE: Final = 1.0 - 1.0 / 8192
"""Factors by which the maxima of parallelism and speed shrink per completion. While the node holds more rollouts than
it was seen to sample in parallel, they shrink fast (`_KEPT_FULL`), because the node then shows its limit; otherwise
slowly (`_KEPT_IDLE`). Set by hand: by half in 177 and 5,678 completions.
"""
_WAY_GROWS: Final = 1.01
"""Factor by which the measured transit time grows per completion. Transit time is the smallest value seen, so it could
not rise otherwise. Set by hand: it doubles in 70 completions."""
_AHEAD: Final = 1.25
"""Limit on a node's held completions, as a multiple of the completions that keep the node busy. Above 1, so that the
node never waits for a new lease. Set by hand."""
_AHEAD_S: Final = 0.4
"""Seconds of additional work that a node may always hold, because hub or node may stall for a moment. Set by hand."""
RAMP: Final = 4
"""Largest ratio of a node's leased work to the work that it has shown to be able to do. It applies while results arrive
within the time that the node's claimed speed promises. Set by hand: 4 rollouts become 256 in three rounds."""
_BELIEVED: Final = 0.8
"""Part of a claimed speed that a node is expected to reach. The rest must be measured: `_AHEAD` allows for it. Set by
hand."""
_NEARLY: Final = 0.1
"""Tolerance of `finish_s` and `fits`, in rounds (a round: all parallel slots sample one completion each). Smaller
excesses add no round. Set by hand."""
_PLACE: Final = 0.25
"""Tolerance of the measured parallelism, in slots: an excess of this fraction of a slot adds no slot. Set by hand."""


@dataclass(slots=True, eq=False)
class NodePace:
    """Figures of one node; all are 0 (unknown) before its first completion."""

    token_s: float = 0.0
    tokens_per_s: float = 0.0
    takes: int = 0
    promised_per_s: float = 0.0
    """Tokens per second that the node claims; 0 = no claim, or a broken one: results came back later than it
    implies."""
    _promised_token_s: float = 0.0
    """Seconds per token within which a completion must be back, according to the node's claim."""
    _is_broken: bool = False
    """True if the node broke its claim since it last connected. Until it connects again, its claims are ignored."""
    _counted_from: float = 0.0
    _num: float = 0.0
    _tokens: float = 0.0
    _drawn_s: float = 0.0
    _worked_s: float = 0.0
    _latency_s: float = 0.0
    _way_s: float = inf
    _most_at_once: float = 0.0
    """Recent maximum of the average number of completions sampled in parallel."""
    _most_per_s: float = 0.0
    """Recent maximum of the average tokens per second."""

    def connect(self) -> None:
        """Forget the claim of the last connection, broken or not."""
        self.promised_per_s, self._is_broken = 0.0, False

    def promise(self, tokens_per_s: float, capacity: int) -> None:
        """Store the node's claim to sample `tokens_per_s`. The claim promises that a completion is back within the time
        in which the node samples `capacity` completions of that length. An honest node is faster, because it asks for
        more rollouts than it samples in parallel."""
        if not self._is_broken and capacity > 0:
            self.promised_per_s = tokens_per_s
            self._promised_token_s = capacity / tokens_per_s if tokens_per_s else 0.0

    def begin(self, now: float) -> None:
        """Start measuring throughput when an idle node gets work."""
        self._counted_from = now

    def arrived(self, num_tokens: int, *, sampling_s: float, latency_s: float, held: int, now: float) -> None:
        """Update all figures with a completion that arrived `latency_s` seconds after it was leased, while the node
        held `held` rollouts. `sampling_s`: sampling time that the node claims; at most `latency_s` of it counts."""
        spent_s, since_s = (sampling_s if sampling_s < latency_s else latency_s), now - self._counted_from
        self._counted_from = now
        self._num = num = self._num * _KEPT + 1.0
        self._tokens = tokens = self._tokens * _KEPT + num_tokens
        self._drawn_s = drawn_s = self._drawn_s * _KEPT + (spent_s if spent_s > 0.0 else 0.0)
        self._worked_s = worked_s = self._worked_s * _KEPT + (since_s if since_s > 0.0 else 0.0)
        self._latency_s = self._latency_s * _KEPT + latency_s
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
        if self.promised_per_s and self._latency_s > tokens * self._promised_token_s + num * (way_s + _AHEAD_S):
            self.break_promise()
        self.token_s, self.tokens_per_s, self._way_s = token_s, per_s, way_s
        self._most_at_once, self._most_per_s = most_at_once, most_per_s
        on_their_way_s = (way_s if way_s > _AHEAD_S else _AHEAD_S) * num / tokens
        self.takes = 1 + ceil(_AHEAD * self._expected_per_s * (token_s + on_their_way_s))

    def missed(self, num_tokens: float, waited_s: float) -> None:
        """Raise token_s because a completion of about `num_tokens` is still missing `waited_s` seconds after its lease.

        Assume that half of it is sampled. The next arrival replaces the estimate.
        """
        if num_tokens:
            self.token_s = max(self.token_s, 2.0 * waited_s / num_tokens)

    def break_promise(self) -> None:
        self.promised_per_s, self._is_broken = 0.0, True

    def finish_s(self, queued_tokens: float, num_tokens: float) -> float:
        """Return the seconds until a new completion of `num_tokens` is back, if the node already holds `queued_tokens`.

        The result is the number of rounds times the duration of one completion, plus the transit time. The queued
        completions take some rounds, the new completion one more.
        """
        rounds = ceil((queued_tokens / num_tokens + 1.0) / self._at_once - _NEARLY) if num_tokens else 1
        return self.token_s * num_tokens * max(1, rounds) + self.way_s

    def fits(self, queued_tokens: float, num_tokens: float, in_s: float) -> int:
        """Return how many further completions of `num_tokens` tokens the node returns within `in_s` seconds, after
        finishing the `queued_tokens` that it holds."""
        alone_s = self.token_s * num_tokens
        if not alone_s:
            return UNBOUNDED
        rounds = int((in_s - self.way_s) / alone_s)
        return max(0, int((rounds + _NEARLY) * self._at_once - queued_tokens / num_tokens)) if rounds > 0 else 0

    @property
    def _at_once(self) -> int:
        """Return how many completions the node samples in parallel. Fractions round up: an underused node would
        otherwise never show more parallelism."""
        return max(1, ceil(self._expected_per_s * self.token_s - _PLACE))

    @property
    def _expected_per_s(self) -> float:
        """Return the tokens per second that the node is expected to reach with enough work: the measured rate or, if
        higher, `_BELIEVED` times its unbroken claim, limited to `RAMP` times the measured rate."""
        return max(self.tokens_per_s, min(_BELIEVED * self.promised_per_s, RAMP * self.tokens_per_s))

    @property
    def way_s(self) -> float:
        """Return the transit time of a completion in seconds, excluding sampling."""
        return self._way_s if self._way_s < inf else 0.0
