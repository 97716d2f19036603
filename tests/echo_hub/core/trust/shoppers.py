"""Simulated rollouts with rewards: of honest engines, and of a node that "shops".

A token's interval is the range of cumulative probability within which the uniform u draws this token. Where u is close
to an edge of the interval, rounding could have selected the neighbouring token. A shopper takes that neighbour whenever
it earns more.

The policy is a table of logits by state; the state follows from all previous tokens. An engine adds to the logits noise
that is constant for each state. Token `STOP` ends a completion.

Dimensions: K states, V tokens of the vocabulary, R rollouts, T positions in a completion.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import NOTHING, added, alarm
from echo_hub.core.trust.likelihood import SCALES, bounded_log_odds
from echo_hub.core.trust.numerics import Honest, Numerics, NumericsClass
from echo_hub.core.trust.shopping import LatestRewards, UsualRank, edges, weigh

STATES: Final = 8_192
VOCABULARY: Final = 4
LONGEST: Final = 6
STOP: Final = 0
VERSIONS: Final = 10
"""Number of policy versions in a run; each one makes tokens of high value more likely."""
LEARNED: Final = 0.1
"""Change of a logit from one version to the next, in nats, for a token whose value is one standard deviation above the
mean.
"""
LEAST_WIDTH: Final = 0.01
"""Minimum probability of a neighbour that a shopper takes; rarer tokens would stand out."""
ALARM: Final = alarm(1e-6)
NOISES: Final = {"q8_0": 0.03, "q4_k_m": 0.12, "q4_0": 0.25}
"""Scale, in nats, of the Student's t noise in an engine's logits, by precision."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """Completions sampled with one version; entries at positions beyond `lengths_R` have no meaning."""

    below_RT: NDArray[np.float64]
    logprobs_RT: NDArray[np.float64]
    uniforms_RT: NDArray[np.float64]
    lengths_R: NDArray[np.int64]
    values_R: NDArray[np.float64]
    """Sum of the tokens' values; a right token has 0, a wrong one -1."""

    @property
    def solved_R(self) -> NDArray[np.float64]:
        return (self.values_R == 0.0).astype(np.float64)

    def replaced(self, places_R: NDArray[np.bool_], other: Drawn) -> Drawn:
        """Return these completions with the rollouts marked in `places_R` taken from `other`."""
        chosen = {
            name: np.where(places_R if mine.ndim == 1 else places_R[:, None], getattr(other, name), mine)
            for name in self.__slots__
            for mine in [getattr(self, name)]
        }
        return Drawn(**chosen)


class World:
    """A policy that learns, and engines that add noise to its logits, in place of rounding."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._base_KV = rng.normal(size=(STATES, VOCABULARY)) * rng.uniform(2.0, 8.0, size=(STATES, 1))
        self.values_KV = np.full((STATES, VOCABULARY), -1.0)
        self.values_KV[np.arange(STATES), self._base_KV.argmax(axis=1)] = 0.0
        self._next_KV = rng.integers(0, STATES, size=(STATES, VOCABULARY))
        self._seed = seed

    def logits(self, version: int) -> NDArray[np.float64]:
        return self._base_KV + LEARNED * version * self.values_KV

    def noise(self, scale: float) -> NDArray[np.float64]:
        """Return the noise that one engine adds to the logits, in nats."""
        rng = np.random.default_rng([self._seed, 1])
        sizes = scale * np.sqrt(4.0 / rng.chisquare(4, size=(STATES, 1)))
        return np.asarray(sizes * rng.normal(size=(STATES, VOCABULARY)))

    def draw(
        self,
        version: int,
        uniforms_RT: NDArray[np.float64],
        noise_KV: NDArray[np.float64] | float = 0.0,
        *,
        changed: tuple[int, NDArray[np.int64]] | None = None,
    ) -> tuple[Drawn, NDArray[np.int64], NDArray[np.float64]]:
        """Return the completions, the sampled tokens [R, T], and the edges between all tokens in cumulative probability
        [R, T, V + 1].

        `changed`: a position, and each rollout's token there, instead of the token that the random number u selects.
        """
        true_KV = _edges(self.logits(version))
        own_KV = _edges(self.logits(version) + noise_KV)
        count = len(uniforms_RT)
        rows, states = np.arange(count), np.arange(count) % 64  # Prompts.
        tokens_RT = np.zeros((count, LONGEST), np.int64)
        edges_RTV = np.zeros((count, LONGEST, VOCABULARY + 1))
        values_R, lengths_R, goes_on = np.zeros(count), np.zeros(count, np.int64), np.ones(count, bool)
        for place in range(LONGEST):
            drawn = (own_KV[states, 1:-1] <= uniforms_RT[:, place, None]).sum(axis=1)
            if changed is not None and changed[0] == place:
                drawn = changed[1]
            tokens_RT[:, place], edges_RTV[:, place] = drawn, true_KV[states]
            values_R += np.where(goes_on, self.values_KV[states, drawn], 0.0)
            lengths_R += goes_on
            goes_on &= drawn != STOP
            states = self._next_KV[states, drawn]
        places = np.arange(LONGEST)
        below_RT = edges_RTV[rows[:, None], places, tokens_RT]
        widths_RT = edges_RTV[rows[:, None], places, tokens_RT + 1] - below_RT
        logprobs_RT = np.log(np.maximum(widths_RT, 1e-12))
        found = Drawn(
            below_RT=below_RT,
            logprobs_RT=logprobs_RT,
            uniforms_RT=uniforms_RT,
            lengths_R=lengths_R,
            values_R=values_R,
        )
        return found, tokens_RT, edges_RTV


def _edges(logits_KV: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each state's cumulative probabilities [K, V + 1], from 0 to 1. A u between edges v and v + 1 of a state
    draws token v.
    """
    weights = np.exp(logits_KV - logits_KV.max(axis=1, keepdims=True))
    cumulative = np.cumsum(weights / weights.sum(axis=1, keepdims=True), axis=1)
    cumulative[:, -1] = 1.0
    return np.concatenate([np.zeros((len(weights), 1)), cumulative], axis=1)


def honest(world: World, precision: str, count: int, seed: int = 0) -> list[Drawn]:
    """Return about `count` rollouts of one honest engine, equally many of each version."""
    noise_KV, rng = world.noise(NOISES[precision]), np.random.default_rng([seed, 2])
    each = count // VERSIONS
    return [world.draw(version, rng.random((each, LONGEST)), noise_KV)[0] for version in range(VERSIONS)]


def shopper(
    world: World,
    count: int,
    *,
    nearest: float = 0.0,
    farthest: float,
    taken: float = 1.0,
    diluted: float = 0.0,
    lost: float = 0.0,
) -> list[Drawn]:
    """Return rollouts of version 0 from a node that computes exactly, but takes a neighbouring token if this solves the
    problem.

    It takes a neighbour only if u, the random number of the draw, is `nearest` to `farthest` nats from the edge between
    the two tokens, in a share `taken` of these cases. To hide this, it takes neighbours of equal reward in a share
    `diluted` of cases, and of lower reward within `nearest` in a share `lost`.
    """
    rng = np.random.default_rng(3)
    return [_shopped(world, 0, rng, count, (nearest, farthest), (taken, diluted, lost))]


def _shopped(
    world: World,
    version: int,
    rng: np.random.Generator,
    count: int,
    reach: tuple[float, float],
    shares: tuple[float, float, float],
) -> Drawn:
    own, tokens_RT, edges_RTV = world.draw(version, rng.random((count, LONGEST)))
    found, is_changed = own, np.zeros(count, bool)
    takes, dilutes, loses = (rng.random(count) < share for share in shares)
    others = list(_neighbours(world, version, own, tokens_RT, edges_RTV))
    for apart_R, other in others:
        chosen_R = takes & ~is_changed & (apart_R >= reach[0]) & (apart_R < reach[1]) & (other.solved_R > own.solved_R)
        found, is_changed = found.replaced(chosen_R, other), is_changed | chosen_R
    for apart_R, other in others:
        is_equal_R, is_worse_R = other.solved_R == own.solved_R, other.solved_R < own.solved_R
        chosen_R = (dilutes & (apart_R < reach[1]) & is_equal_R) | (loses & (apart_R < reach[0]) & is_worse_R)
        chosen_R &= ~is_changed
        found, is_changed = found.replaced(chosen_R, other), is_changed | chosen_R
    return found


def _neighbours(
    world: World, version: int, own: Drawn, tokens_RT: NDArray[np.int64], edges_RTV: NDArray[np.float64]
) -> Iterator[tuple[NDArray[np.float64], Drawn]]:
    """Yield the distance of the random number u from an edge of the token's interval of cumulative probability, in
    nats, and the completions that continue from the neighbouring token beyond this edge: for each position in the
    completions, and for both edges.
    """
    rows = np.arange(len(tokens_RT))
    for place in range(LONGEST):
        for side in (-1, 1):
            beside_R = tokens_RT[:, place] + side
            neighbours_R = beside_R.clip(0, VOCABULARY - 1)
            widths_R = np.diff(edges_RTV[:, place])[rows, neighbours_R]
            is_there_R = (beside_R == neighbours_R) & (place < own.lengths_R) & (widths_R > LEAST_WIDTH)
            edge_R = edges_RTV[rows, place, tokens_RT[:, place] + (side > 0)]
            apart_R = np.abs(bounded_log_odds(own.uniforms_RT[:, place]) - bounded_log_odds(edge_R))
            other, _, _ = world.draw(version, own.uniforms_RT, changed=(place, neighbours_R))
            yield np.where(is_there_R, apart_R, np.inf), other


def shown(drawn: Sequence[Drawn], claim_noise: float) -> list[Evidence]:
    """Return the evidence of each rollout. The node's claimed log-odds have noise of the scale `claim_noise`, in
    nats.
    """
    rng, found = np.random.default_rng(5), []
    for one in drawn:
        is_there = np.arange(LONGEST) < one.lengths_R[:, None]
        below, logprobs, uniforms = (values[is_there] for values in (one.below_RT, one.logprobs_RT, one.uniforms_RT))
        odds = logprobs - np.log(-np.expm1(np.minimum(logprobs, -1e-9)))
        claims = -np.logaddexp(0.0, -(odds + 1.3 * claim_noise * rng.standard_t(4, len(odds))))
        found += Evidence.of_spans(below, logprobs, uniforms, claims, one.lengths_R.tolist())
    return found


def rewards(drawn: Sequence[Drawn], of: Callable[[Drawn], NDArray[np.float64]]) -> list[float]:
    return [reward for one in drawn for reward in of(one).tolist()]


def scale_of(world: World, precision: str) -> Honest:
    """Return the rounding scales of this precision, as the verifier would measure them."""
    told, numerics = NumericsClass("torch", precision, "cpu"), Numerics()
    total = Evidence.of([], [], [], [])
    for one in shown(honest(world, precision, 2_000, seed=9), NOISES[precision]):
        total += one
    numerics.measured(told.rounding, total)
    return numerics.honest(numerics.known(told))


def convicted(found: Sequence[Evidence], earned: Sequence[float], known: Honest) -> tuple[int | None, float]:
    """Return the number of rollouts after which the node is convicted of shopping, or None, and its largest sum of
    evidence in nats.
    """
    usual, ranks, sums, largest = UsualRank(), LatestRewards(), NOTHING, 0.0
    for number, (evidence, reward) in enumerate(zip(found, earned, strict=True), start=1):
        one = edges("a", evidence, known)
        sums = added(sums, weigh(one, usual.excess(ranks.rank(reward), one)))
        largest = max(largest, *sums)
        if largest >= ALARM:
            return number, largest
    return None, largest


def nats(known: Honest) -> float:
    """Return the rounding scale, in nats, with which sampled tokens (draws) of the class are judged; `known`: the
    class's scales.
    """
    return float(SCALES[known.draws])
