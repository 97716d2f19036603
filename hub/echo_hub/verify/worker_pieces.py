"""Pieces of rollouts, each drawn with one version: cut for the examination, and joined to results afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_hub.learner import routing
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout
from echo_hub.verify.drawn import DrawnRollout
from echo_shared.sampling.torch_routes import Routers
from echo_shared.wire.routes import routes_of

FoundTokens = NDArray[np.float64]
"""Array of shape [2, N] for N tokens: the lower end of the interval of cumulative probability that draws each token,
and its true log-probability in nats. For a greedy token, the first value is how far its log-probability is below that
of the most likely token, in nats."""


@dataclass(slots=True, kw_only=True, eq=False)
class RecomputedRollout:
    """A rollout under examination. `missing`: number of its tokens without a result so far."""

    drawn: DrawnRollout
    missing: int
    found_2T: NDArray[np.float64]
    """Results as in `FoundTokens`, for the T tokens of the rollout."""
    seconds: float = 0.0
    cannot: str = ""
    """Why the rollout cannot be computed; empty if it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutPiece:
    """Tokens `start` to `stop` - 1 of a rollout, which were all drawn with one version."""

    case: RecomputedRollout = field(repr=False)
    policy_version: int
    start: int
    stop: int


def pieces_of(drawn: DrawnRollout) -> list[RolloutPiece]:
    count = len(drawn.completion_ids)
    case = RecomputedRollout(drawn=drawn, missing=count, found_2T=np.empty((2, count)))
    pieces = []
    start = 0
    for version, spans in groupby(drawn.spans, key=lambda span: span.policy_version):
        stop = start + sum(span.num_tokens for span in spans)
        pieces.append(RolloutPiece(case=case, policy_version=version, start=start, stop=stop))
        start = stop
    return pieces


def by_prompt(
    pieces: Sequence[RolloutPiece], routers: Routers | None
) -> tuple[list[WeightedGroup], list[RolloutPiece]]:
    """Group the pieces by version and prompt, as the learner packs them. Return the groups, and the pieces in the order
    of the groups. `routers`: those of the model, which replay the pieces' routes.
    """
    families: dict[tuple[int, bytes], list[RolloutPiece]] = {}
    for piece in pieces:
        families.setdefault((piece.policy_version, prompt_of(piece)), []).append(piece)
    groups = [
        WeightedGroup(
            prompt_ids=members[0].case.drawn.prompt_ids, rollouts=tuple(_weighted(one, routers) for one in members)
        )
        for members in families.values()
    ]
    return groups, [piece for members in families.values() for piece in members]


def num_positions(of_version: Sequence[RolloutPiece]) -> int:
    """Return the number of positions that these pieces take in a micro-batch: each prompt once, and each completion
    without its last token.
    """
    prompts = sum(len(next(same).case.drawn.prompt_ids) for _, same in groupby(of_version, key=prompt_of))
    return prompts + sum(piece.stop - 1 for piece in of_version)


def version_of(piece: RolloutPiece) -> int:
    return piece.policy_version


def prompt_of(piece: RolloutPiece) -> bytes:
    return piece.case.drawn.prompt_ids.astype("<i4").tobytes()


def _weighted(piece: RolloutPiece, routers: Routers | None) -> WeightedRollout:
    """Return a piece as a rollout that ends with the piece. Its tokens before the piece are computed, but not
    examined."""
    drawn = piece.case.drawn
    fits = routing.fits(drawn.routes, len(drawn.completion_ids), routers)
    return WeightedRollout(
        completion_ids=drawn.completion_ids[: piece.stop],
        loss_mask=np.arange(piece.stop) >= piece.start,
        behavior_logprobs=drawn.behavior_logprobs[: piece.stop],
        advantages=np.zeros(piece.stop - piece.start),
        weight=0.0,
        routes=routes_of(drawn, piece.stop) if fits else b"",
    )


def greedy_tokens(pieces: Sequence[RolloutPiece]) -> Tensor | None:
    """Return a boolean for each token of the pieces, True in greedy completions; None if no completion is greedy."""
    of_pieces = [piece.case.drawn.is_greedy for piece in pieces]
    if not any(of_pieces):
        return None
    return torch.from_numpy(np.repeat(of_pieces, [piece.stop - piece.start for piece in pieces]))


def spread_seconds(seconds: float, pieces: Sequence[RolloutPiece]) -> None:
    """Divide the time of a batch among its pieces, in proportion to their computed tokens."""
    tokens = [len(piece.case.drawn.prompt_ids) + piece.stop for piece in pieces]
    for piece, own in zip(pieces, tokens, strict=True):
        piece.case.seconds += seconds * own / sum(tokens)


def taken(pieces: Sequence[RolloutPiece], found_2N: FoundTokens) -> list[RecomputedRollout]:
    """Store the results of these pieces. Return the rollouts that this completes."""
    end = 0
    complete = []
    for piece in pieces:
        case, count = piece.case, piece.stop - piece.start
        begin, end = end, end + count
        case.found_2T[:, piece.start : piece.stop] = found_2N[:, begin:end]
        case.missing -= count
        if case.missing == 0 and not case.cannot:
            complete.append(case)
    for case in complete:
        if np.isnan(case.found_2T).any():
            case.cannot = "The policy's logits are not finite."
    return complete


def refused(pieces: Sequence[RolloutPiece], why: str) -> list[RecomputedRollout]:
    """Note why these pieces are not computed. Return the rollouts that were not refused before."""
    refused = []
    for piece in pieces:
        if not piece.case.cannot:
            piece.case.cannot = why
            refused.append(piece.case)
    return refused
