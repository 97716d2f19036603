"""Check leases: a node recomputes the token probabilities of another node's completion."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from echo_shared.wire.messages.base import WireMessage
from echo_shared.wire.messages.fields import Logprobs, RolloutId, Shares, TokenIds
from echo_shared.wire.messages.rollouts import VersionSpans

MAX_CHECKS: Final = 8
"""Maximum number of completions that a node checks at a time."""


class CheckLease(WireMessage):
    """Ask a node to recompute another node's completion with the policy versions that drew it.

    The lease omits the seed and the claimed log-probabilities, so that the checking node cannot copy its result from
    them.
    """

    type: Literal["check_lease"] = "check_lease"
    rollout_id: RolloutId
    prompt_ids: TokenIds
    completion_ids: TokenIds
    versions: Annotated[VersionSpans, Field(min_length=1)]
    """Versions that drew the completion, in token order."""
    temperature: Annotated[float, Field(gt=0, le=10)]
    deadline_s: Annotated[float, Field(gt=0)]
    """Seconds from the sending of this lease until the hub asks another node."""

    @model_validator(mode="after")
    def _has_all(self) -> CheckLease:
        if not len(self.prompt_ids) or sum(span.num_tokens for span in self.versions) != len(self.completion_ids):
            raise ValueError("a check needs a prompt, and its versions must cover exactly the completion's tokens")
        return self


class CheckResult(WireMessage):
    """For each token of the completion, the range of cumulative probability within which the random number draws this
    token, as the checking node computed it. Both arrays are empty if its engine cannot check.
    """

    type: Literal["check_result"] = "check_result"
    rollout_id: RolloutId
    below: Shares
    """Lower end of each token's range: the summed probability of all smaller token ids, at the lease's temperature."""
    logprobs: Logprobs
    """Natural logarithm of the width of each token's range, which is the token's log-probability."""

    @model_validator(mode="after")
    def _is_whole(self) -> CheckResult:
        if len(self.below) != len(self.logprobs):
            raise ValueError("below and logprobs must have the same length")
        return self
