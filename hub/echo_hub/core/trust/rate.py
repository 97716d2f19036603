"""Choice of the rollouts that are checked: adaptive replication, as in BOINC (Anderson, J. Grid Computing 18, 2020,
section 4.1).

The hub checks all rollouts of a node until the node is proven, and in any case the node's first `first` rollouts. A
proven node with n verified rollouts in a row has each rollout checked with probability max(least, first / n); a failed
check sets n to 0. BOINC uses 1 / n, because each BOINC result is clearly right or wrong. Here most dishonesty shows
only in dozens of short rollouts. So a node that has just become proven is checked more often, and half of its rollouts
are checked when 2 * first were verified.

A long rollout shows more, so it counts for several (`worth`): completions of 512 tokens count for eight.

The check of a proven node's rollout may wait until the verifier has a fuller batch, which is cheaper. A node may have
one such waiting check for every `PATIENCE` verified rollouts (`patience`). This bounds how much a node can send after
it turns dishonest.

The choice follows from the rollout's id and a secret of the hub. A restart does not change it, and nodes cannot predict
it.
"""

from __future__ import annotations

from hashlib import blake2b
from math import ceil
from typing import Final

SHORT: Final = 64
"""Number of tokens that count as one verified rollout: a longer checked rollout counts for several."""
MOST_WORTH: Final = 8
"""Maximum number of verified rollouts that one rollout counts for. Otherwise few long rollouts would suffice, and a
node that forges only some of its rollouts would be missed."""
PATIENCE: Final = 32
"""Number of verified rollouts of a node that allow one more of its checks to wait for a fuller batch."""
_ALL: Final = 2**64


def worth(num_tokens: int) -> int:
    """Return for how many verified rollouts one rollout of `num_tokens` counts."""
    return max(1, min(MOST_WORTH, num_tokens // SHORT))


def share_checked(num_verified: int, first: int, least: float) -> float:
    """Return the probability that the next rollout of a proven node is checked."""
    return max(least, first / num_verified) if num_verified > first else 1.0


def long_proven(first: int, least: float) -> int:
    """Return the number of verified rollouts in a row from which the checked share stays at `least`; a `least` below a
    thousandth counts as a thousandth."""
    return ceil(first / max(least, 0.001)) + 1


def patience(num_verified: int) -> int:
    """Return how many checks of a node may wait for a fuller batch."""
    return num_verified // PATIENCE


def is_drawn(secret: bytes, rollout_id: str, share: float) -> bool:
    """Return True if this rollout belongs to the checked `share`. `secret` always has the same length."""
    if share >= 1.0:
        return True
    # For speed, because this runs for every rollout: bytes are compared, and the secret is a prefix, which is safe with
    # BLAKE2. Numbers and the keyed mode take four times as long.
    return blake2b(secret + rollout_id.encode()).digest() < int(share * _ALL).to_bytes(8, "big")
