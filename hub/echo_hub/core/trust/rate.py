"""How often a node's rollouts are checked, and which: adaptive replication, as in BOINC (Anderson, J. Grid Computing
18, 2020, section 4.1).

All of them until the node is proven, the first `first` at least. After n verified in a row, each with probability
max(least, first / n); one that is found wanting sets n to 0. BOINC has 1 / n: there one result shows at once whether it
is right. Here most dishonesty takes dozens of short rollouts to show, so who was honest just long enough to be trusted
is looked at oftener, and less often only as it goes on: half of its rollouts when 2 * first were verified.

What a rollout shows grows with its tokens, so a long one counts for several of those (`worth`): with completions of 512
tokens a node's first eight do.

A check waits for company, which makes it cheap, but of a node no more than one for every `PATIENCE` that were verified
(`patience`): how much a fast one can send that turns follows from how long it was honest.

Which ones follows from the rollout's id and a secret of the hub: the same after a restart, and nothing that a node
could know before it sends.
"""

from __future__ import annotations

from hashlib import blake2b
from math import ceil
from typing import Final

SHORT: Final = 64
"""Tokens. Of longer rollouts each so many count as one more verified."""
MOST_WORTH: Final = 8
"""Rollouts for which one counts at most: who forges some of his rollouts only is found by their number."""
PATIENCE: Final = 32
_ALL: Final = 2**64


def worth(num_tokens: int) -> int:
    """For how many verified rollouts one of so many tokens counts."""
    return max(1, min(MOST_WORTH, num_tokens // SHORT))


def share_checked(num_verified: int, first: int, least: float) -> float:
    """With what probability the next rollout of a proven node is checked."""
    return max(least, first / num_verified) if num_verified > first else 1.0


def long_proven(first: int, least: float) -> int:
    """Verified in a row after which no smaller share is checked; where that falls for ever, a thousandth is."""
    return ceil(first / max(least, 0.001)) + 1


def patience(num_verified: int) -> int:
    """How many checks of a node may wait for company."""
    return num_verified // PATIENCE


def is_drawn(secret: bytes, rollout_id: str, share: float) -> bool:
    """Whether this rollout is among the `share` that is checked. `secret`: of the same length all the time."""
    if share >= 1.0:
        return True
    # Compared as bytes, and keyed by its beginning, which BLAKE2 allows: a number and the keyed mode take four times as
    # long, and this is asked of every rollout.
    return blake2b(secret + rollout_id.encode()).digest() < int(share * _ALL).to_bytes(8, "big")
