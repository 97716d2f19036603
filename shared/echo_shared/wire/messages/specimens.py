"""Large example messages, one of each kind with arrays. An installation tests itself by decoding them."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_shared.wire.messages.checking import CheckLease, CheckResult
from echo_shared.wire.messages.leases import Lease, LeasedPrefix
from echo_shared.wire.messages.rollouts import FinishReason, Rollout, RolloutPart, RolloutParts, VersionSpan

NUM_TOKENS: Final = 5_000
"""Tokens of an example message: so many that the codec decodes the frame field by field, see
`echo_shared.wire.codec.SMALL_BYTES`.
"""


def from_hub() -> tuple[Lease, CheckLease]:
    ids, logprobs = _arrays()
    spans = (VersionSpan(policy_version=1, num_tokens=NUM_TOKENS),)
    lease = Lease(
        lease_id=1,
        group_id=1,
        indices=(0, 1),
        prompt_ids=ids,
        seed=1,
        policy_version=1,
        temperature=1.0,
        max_tokens=2 * NUM_TOKENS,
        stop_ids=(2,),
        deadline_s=60.0,
        prefixes=(LeasedPrefix(index=1, ids=ids, logprobs=logprobs, versions=spans),),
    )
    check = CheckLease(
        rollout_id="1-0", prompt_ids=ids, completion_ids=ids, versions=spans, temperature=1.0, deadline_s=60.0
    )
    return lease, check


def from_node() -> tuple[Rollout, RolloutParts, CheckResult]:
    ids, logprobs = _arrays()
    rollout = Rollout(
        rollout_id="1-0",
        lease_id=1,
        group_id=1,
        index=0,
        policy_version_start=1,
        policy_version_end=1,
        completion_ids=ids,
        behavior_logprobs=logprobs,
        finish_reason=FinishReason.LENGTH,
        sampling_s=1.0,
        versions=(VersionSpan(policy_version=1, num_tokens=NUM_TOKENS),),
        routes=bytes(4 * NUM_TOKENS),
    )
    part = RolloutPart(lease_id=1, index=0, start=0, policy_version=1, ids=ids, logprobs=logprobs)
    result = CheckResult(rollout_id="1-0", below=np.exp(logprobs), logprobs=logprobs)
    return rollout, RolloutParts(parts=(part, part)), result


def _arrays() -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    return np.arange(NUM_TOKENS, dtype=np.int32), np.linspace(-20.0, 0.0, NUM_TOKENS, dtype=np.float32)
