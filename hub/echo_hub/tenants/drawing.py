"""Interface of the drawer, which samples tenants' completions. The hub's own device or the nodes draw; callers need not
know which.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from echo_hub.tenants.requests import Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawJob:
    """One `sample` request with all its parameters and its seed. Drawing the same job again gives the same tokens."""

    request_id: str
    tenant_id: str
    prompt_ids: NDArray[np.int32]
    sequence_ids: tuple[str, ...]
    """Id of each sample of the job. Sample i is drawn with the random numbers of (seed, first_index + i)."""
    policy_version: int
    """Number of the published adapter that draws; 0 = the base model. `echo_hub.tenants.versions` gives its
    directory."""
    temperature: float
    max_tokens: int
    stop_ids: tuple[int, ...]
    stop_strings: tuple[str, ...]
    seed: int
    """Seed of all draws of the job, from 0 to 2**64 - 1."""
    checked: bool
    first_index: int = 0
    """Offset of the job's samples in the random numbers of `seed`. Jobs for which the client gave no seed, with equal
    prompts, versions and parameters, may get one seed and consecutive indices. They can then be drawn as one group.
    Which of them wait together does not change the tokens. Jobs of different tenants never share a seed."""
    joins: bool = False
    """True if the client gave no seed. A drawer may then draw equal jobs as one group with its own seed, if it
    stores the group before drawing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawnPiece:
    """New tokens of an unfinished sample, for streaming."""

    index: int
    start: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]


class TenantDrawer(Protocol):
    def draw(self, job: DrawJob) -> AsyncIterator[DrawnPiece | Sample]:
        """Yield pieces as tokens are drawn, and each finished sample exactly once. Cancelling stops the drawing. A
        node's failure never ends the job: another node gets its work. Raises Refusal if the job cannot be drawn as
        asked."""

    async def publish(self, policy_version: int, directory: Path) -> None:
        """Make jobs with a tenant's adapter drawable, and return once they are. A restarted hub calls this again for
        each version in use."""

    async def withdraw(self, policy_version: int) -> None:
        """Forget an adapter. No job with it is unfinished or will come; the caller deletes its directory afterwards."""

    def width(self) -> int:
        """Number of unfinished samples that keeps the hub's device or all nodes busy. More samples would only wait."""

    def state(self) -> str:
        """Return one sentence for clients that wait, for example "2 of 5 nodes are here"; empty = all is well."""
