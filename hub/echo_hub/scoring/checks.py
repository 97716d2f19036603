"""Cheap checks of a rollout's payload, which every honest backend passes. The core checks the lease itself.

In a fair draw, claimed log-probabilities are rarely very low, for any model, prompt and temperature: in a vocabulary of
V tokens, all tokens with probability q or less together have at most the probability V q. So a token's *excess*

    x = max(0, -logprob - ln V)        is x or more with probability at most exp(-x),

given all tokens before it. The sum of k excesses at given places of a completion is therefore dominated by a gamma
distribution of shape k. For the k largest of N places, over all choices of places,

    P(sum >= s) <= (N choose k) exp(-s) (1 + s + ... + s^(k-1) / (k-1)!)

A completion is refused if this bound is below `FALSE_REJECTION` for any k. The allowed probability is divided over all
tests: each k gets the share 1 / (k (k + 1)), and each range of lengths up to N = 2^j gets 1 / ((j + 1) (j + 2)),
because the sampler decides where a completion ends. So a long completion may contain one token that fair draws give
once in 10^9 draws, but not two.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, log
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.accounting.parameters import SamplingParameters
from echo_hub.run.experts import Experts
from echo_hub.scoring.stop_strings import NO_STRINGS, StopStrings
from echo_shared.errors import RemoteProtocolError
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import NO_ROUTE, FinishReason
from echo_shared.wire.routes import bytes_per_token, fit

LOGPROB_SLACK: Final = 1e-3
"""Largest log-probability that is accepted, in nats. By rounding, a backend's value may exceed 0 by this much."""
FALSE_REJECTION: Final = 1e-9
"""Largest allowed probability that a fair completion is refused because of its log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingBounds:
    """Limits that every completion of a group must keep: those of the run, or of a tenant's request."""

    vocabulary_size: int
    max_tokens: int
    stop_ids: frozenset[int]
    stop_strings: StopStrings = NO_STRINGS
    """Stop strings; a completion is cut after the first one that occurs."""
    experts: Experts | None = None
    """The experts of the base model, if completions may report their routes (which experts each token used)."""

    def of_request(self, sampling: SamplingParameters | None) -> SamplingBounds:
        """Return the limits of a tenant's request. If `sampling` is None, return the run's own limits. A tenant's
        request never asks for routes."""
        if sampling is None:
            return self
        return SamplingBounds(
            vocabulary_size=self.vocabulary_size,
            max_tokens=sampling.max_tokens,
            stop_ids=frozenset(sampling.stop_ids),
            stop_strings=self.stop_strings.of_request(sampling.stop_strings),
        )


def check_payload(payload: RolloutPayload, bounds: SamplingBounds) -> None:
    """Raise RemoteProtocolError, with the reason, if no honest node can have drawn the completion within the bounds."""
    ids, logprobs = payload.completion_ids, payload.behavior_logprobs
    if not 1 <= len(ids) <= bounds.max_tokens:
        raise RemoteProtocolError("A completion has a wrong length.", got=f"{len(ids)} tokens of {bounds.max_tokens}")
    if len(logprobs) != len(ids):
        raise RemoteProtocolError(
            "A completion needs one logprob a token.", got=f"{len(logprobs)} for {len(ids)} tokens"
        )
    if np.maximum.reduce(ids.view(np.uint32)) >= bounds.vocabulary_size:  # As unsigned numbers, negative ids are large.
        raise RemoteProtocolError("A token is not in the vocabulary.", got=f"ids {int(ids.min())} to {int(ids.max())}")
    lowest_logprob, highest = float(np.minimum.reduce(logprobs)), float(np.maximum.reduce(logprobs))
    if not (isfinite(lowest_logprob) and isfinite(highest)):
        raise RemoteProtocolError("A log-probability is not a number.", got=str(logprobs[~np.isfinite(logprobs)][0]))
    if highest > LOGPROB_SLACK:
        raise RemoteProtocolError("A log-probability is above zero.", got=f"{highest:.4f}")
    may_be_rare = -lowest_logprob > log(bounds.vocabulary_size)
    if may_be_rare and log_chance(logprobs, bounds.vocabulary_size) < log(FALSE_REJECTION):
        lowest = ", ".join(f"{value:.1f}" for value in np.sort(logprobs)[:3])
        raise RemoteProtocolError(
            "No fair draw gives tokens that are as improbable as these log-probabilities say.",
            got=f"{len(ids)} tokens, the lowest: {lowest}",
        )
    if payload.routes:
        _check_routes(payload, bounds.experts)
    stops = stop_table(bounds.stop_ids, bounds.vocabulary_size)[ids]
    if stops[:-1].any():
        raise RemoteProtocolError("A completion goes on after its stop token.", got=f"{int(stops.sum())} stop tokens")
    at_string = bounds.stop_strings.end(ids) == len(ids)
    if payload.finish_reason is FinishReason.STOP and not stops[-1] and not at_string:
        raise RemoteProtocolError("A completion claims to have stopped, without a stop token.", got=str(int(ids[-1])))
    if payload.finish_reason is FinishReason.LENGTH and (stops[-1] or len(ids) != bounds.max_tokens):
        raise RemoteProtocolError("A completion claims to be cut at its length.", got=f"{len(ids)} tokens")


def _check_routes(payload: RolloutPayload, experts: Experts | None) -> None:
    """Raise RemoteProtocolError unless the completion's routes (the experts that computed each token) are possible for
    a model with these experts."""
    if experts is None:
        raise RemoteProtocolError("A completion has routes, which its lease does not ask for.")
    tokens, size = len(payload.completion_ids), len(payload.routes)
    if not fit(payload) or bytes_per_token(payload) > experts.most_route_bytes:
        raise RemoteProtocolError(
            "A completion's routes have a wrong size.",
            got=f"{size} bytes for {tokens} tokens, at most {experts.most_route_bytes} for each",
        )
    ids = np.frombuffer(payload.routes, np.uint8)
    highest = int(ids[ids != NO_ROUTE].max(initial=0))
    if highest >= experts.count:
        raise RemoteProtocolError("A route names an expert that the model does not have.", got=str(highest))


@lru_cache(maxsize=32)
def stop_table(stop_ids: frozenset[int], vocabulary_size: int) -> NDArray[np.bool_]:
    """Return a boolean table with one entry per token of the vocabulary, True for stop tokens."""
    table = np.zeros(vocabulary_size, np.bool_)
    table[[stop for stop in stop_ids if stop < vocabulary_size]] = True
    return table


def log_chance(logprobs: NDArray[np.float32], vocabulary_size: int) -> float:
    """Return the logarithm of an upper bound on the probability that a fair draw gives log-probabilities this low.
    `logprobs` has one value for each token, in nats."""
    excess = np.maximum(-logprobs.astype(np.float64) - log(vocabulary_size), 0)
    if not excess.any():
        return 0.0
    sums = np.cumsum(np.sort(excess)[::-1])
    sizes = np.arange(1, len(sums) + 1)
    doublings = (len(excess) - 1).bit_length()
    places = 1 << doublings
    factorials = _log_factorials(places)
    # Each term of the series is at most `shrink` times the next term. So bound the series by a geometric series that
    # starts at its last term.
    shrink = (sizes - 1) / sums
    with np.errstate(divide="ignore", invalid="ignore"):
        tails = -sums + (sizes - 1) * np.log(sums) - factorials[sizes - 1] - np.log1p(-shrink)
    choices = factorials[places] - factorials[sizes] - factorials[places - sizes]
    chances = np.where(shrink < 1, tails, 0) + choices + np.log(sizes * (sizes + 1.0))
    return min(0.0, float(chances.min()) + log((doublings + 1) * (doublings + 2)))


@lru_cache(maxsize=32)
def _log_factorials(most: int) -> NDArray[np.float64]:
    """Return the logarithms of 0!, 1!, ..., most!."""
    return np.concatenate(([0.0], np.cumsum(np.log(np.arange(1, most + 1)))))
