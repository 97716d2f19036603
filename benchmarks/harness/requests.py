"""Requests for a sampling engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from echo_shared.sampling import GroupRequest


def group_request(
    number: int,
    prompt_ids: NDArray[np.int32],
    *,
    seed: int,
    indices: Sequence[int],
    max_tokens: int,
    stop_ids: Sequence[int] = (),
    temperature: float = 1.0,
) -> GroupRequest:
    """Make a request whose lease and group have this number, by version 0."""
    return GroupRequest(
        lease_id=number,
        group_id=number,
        indices=tuple(indices),
        prompt_ids=prompt_ids,
        seed=seed,
        policy_version=0,
        temperature=temperature,
        max_tokens=max_tokens,
        stop_ids=tuple(stop_ids),
    )
