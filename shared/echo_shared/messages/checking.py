"""Completions of others that a node computes again, and what it finds."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from echo_shared.messages.base import Message
from echo_shared.messages.fields import Logprobs, RolloutId, Shares, TokenIds
from echo_shared.messages.rollouts import VersionSpans

MAX_CHECKS: Final = 8
"""Completions of others that one node is given at once, to compute again."""


class CheckLease(Message):
    """Work for a node that can score: a completion of another, to be computed again by the versions that drew it.

    Neither what was claimed of it nor its seed is said, so that what comes back cannot be made of them.
    """

    type: Literal["check_lease"] = "check_lease"
    rollout_id: RolloutId
    prompt_ids: TokenIds
    """All that it was drawn after."""
    completion_ids: TokenIds
    versions: Annotated[VersionSpans, Field(min_length=1)]
    """Which versions drew it, in order, one after the other."""
    temperature: Annotated[float, Field(gt=0, le=10)]
    deadline_s: Annotated[float, Field(gt=0)]
    """Seconds from sending until the hub asks another node."""

    @model_validator(mode="after")
    def _has_all(self) -> CheckLease:
        if not len(self.prompt_ids) or sum(span.num_tokens for span in self.versions) != len(self.completion_ids):
            raise ValueError("there must be a prompt, and the versions be of as many tokens as the completion has")
        return self


class CheckResult(Message):
    """What a completion's tokens are by the versions that drew it; both arrays empty = the node cannot tell."""

    type: Literal["check_result"] = "check_result"
    rollout_id: RolloutId
    below: Shares
    """Where each token's interval begins in the cumulative distribution, in id order, at the lease's temperature."""
    logprobs: Logprobs
    """How wide it is: nats, one a token."""

    @model_validator(mode="after")
    def _is_whole(self) -> CheckResult:
        if len(self.below) != len(self.logprobs):
            raise ValueError("there must be as many beginnings as log-probabilities")
        return self
