"""A completion as marked text. Marks show each token's probability or its policy version by colour.

A mark is a CSS class, because the pages' security policy forbids inline colours. The legend explains the colours. The
tooltip of each marked part shows its figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Literal

import numpy as np

from echo_hub.dashboard.formats import visible
from echo_shared.records.rollout import RolloutText, TextPiece

Colour = Literal["logprob", "version", "none"]

MOST_PIECES: Final = 4_000
"""Largest number of pieces that get marks; the rest of a longer completion is shown without marks."""
BOUNDS: Final = (0.9, 0.5, 0.1, 0.01)
"""Thresholds of a token's probability. The mark is one level stronger for each threshold above the probability."""
NUM_VERSION_MARKS: Final = 6
"""Number of marks for policy versions. If a group has more versions, marks are reused."""
_LEAST_LIKELY: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenMark:
    """A part of a completion's text that has one mark (a colour)."""

    text: str
    css: str
    """CSS class of this part; "" if it has no mark."""
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    mean_logprob: float
    """Mean log-probability of the tokens, in nats."""
    least_likely: tuple[tuple[str, float], ...]
    """Texts and probabilities of the least likely tokens."""


def marks(drawn: RolloutText, colour: Colour, versions: Sequence[int]) -> tuple[TokenMark, ...]:
    """Return the whole completion as marked parts. `versions` are all policy versions in the group, ascending."""
    if colour == "none":
        return (TokenMark(text=visible(drawn.text), css="", title=""),)
    shown, rest = drawn.pieces[:MOST_PIECES], drawn.pieces[MOST_PIECES:]
    if colour == "logprob":
        found = [TokenMark(text=visible(piece.text), css=_likeliness(piece), title=_title(piece)) for piece in shown]
    else:
        found = [
            TokenMark(
                text=visible("".join(piece.text for piece in of_version)),
                css=f"v{versions.index(version) % NUM_VERSION_MARKS}",
                title=f"version {version}",
            )
            for version, of_version in groupby(shown, key=lambda piece: piece.version)
        ]
    if rest:
        found.append(TokenMark(text=visible("".join(piece.text for piece in rest)), css="", title=""))
    return tuple(found)


def legend(colour: Colour, versions: Sequence[int]) -> list[tuple[str, str]]:
    """Return the CSS class and the explanation of each mark."""
    if colour == "none":
        return []
    if colour == "version":
        return [(f"v{number % NUM_VERSION_MARKS}", f"version {version}") for number, version in enumerate(versions)]
    words = ["90 % or more", "50 to 90 %", "10 to 50 %", "1 to 10 %", "less than 1 %"]
    return [(f"p{number}", said) for number, said in enumerate(words)]


def summary_of(drawn: RolloutText) -> Figures:
    logprobs = drawn.payload.behavior_logprobs
    least = sorted(drawn.pieces, key=lambda piece: piece.logprob)[:_LEAST_LIKELY]
    return Figures(
        mean_logprob=float(logprobs.sum(dtype=np.float64)) / max(1, len(logprobs)),
        least_likely=tuple((piece.text, _probability(piece)) for piece in least),
    )


def _probability(piece: TextPiece) -> float:
    """Return the geometric mean of the probabilities of a piece's tokens. A node may claim impossible values, so the
    result is limited to 0..1.
    """
    return math.exp(min(0.0, piece.logprob / piece.num_tokens)) if math.isfinite(piece.logprob) else 0.0


def _likeliness(piece: TextPiece) -> str:
    return f"p{sum(_probability(piece) < bound for bound in BOUNDS)}"


def _title(piece: TextPiece) -> str:
    count = "" if piece.num_tokens == 1 else f", {piece.num_tokens} tokens"
    return f"{100 * _probability(piece):.3g} %, {piece.logprob:.2f} nats{count}, version {piece.version}"
