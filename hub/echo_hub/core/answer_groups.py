"""Groups of tenants' samples: one prompt, one seed, one version and one set of sampling parameters.

Their ids lie above those of evaluations (`evaluation_groups`) and below 2**53, the largest number on the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_hub.core.accounting.parameters import SamplingParameters

FIRST_ANSWER_ID: Final = 2**52
"""Smallest id of a group of tenants' samples."""


def is_answer(group_id: int) -> bool:
    return group_id >= FIRST_ANSWER_ID


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerMember:
    """One request in a group. Its samples are the group's indices from `first_index` on."""

    request_id: str
    num_samples: int
    first_index: int = 0
    is_cancelled: bool = False

    @property
    def indices(self) -> range:
        return range(self.first_index, self.first_index + self.num_samples)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AnswerGroup:
    """Requests of one tenant with equal prompt, version and sampling parameters: their samples share a prefill. The
    sample of index i is drawn with (seed, i). No two requests have an index in common, and indices that belong to no
    request are not drawn."""

    group_id: int
    tenant_id: str
    prompt_ids: NDArray[np.int32]
    policy_version: int
    """Version with which nodes sample; 0 = the base model."""
    seed: int
    sampling: SamplingParameters
    is_checked: bool
    """True if the tenant wants only samples that passed a check."""
    members: tuple[AnswerMember, ...]

    @property
    def wanted(self) -> frozenset[int]:
        """Return the indices of all samples whose requests are not cancelled."""
        return frozenset(index for member in self.members if not member.is_cancelled for index in member.indices)

    @property
    def end(self) -> int:
        """Return the largest index plus 1."""
        return max(member.indices.stop for member in self.members)


@dataclass(frozen=True, slots=True, eq=False)
class StreamedTokens:
    """Tokens of an unfinished sample that a node has sent so far."""

    node_id: str
    group_id: int
    index: int
    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
