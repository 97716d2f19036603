"""Measure how coarsely an engine rounds, on the run's own base and policy.

The verifier completes some of the run's prompts. It computes every position twice: in its own precision, and emulating
an engine of the given rounding (`emulation`). If both are float32, one pass serves for both. The verifier draws tokens
from the emulated distribution and examines them like those of a node. The result is the evidence that an honest node
with this rounding would show; it includes the verifier's own rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.numerics import EXACT_ROUNDING
from echo_hub.learner.batch import MicroBatch, build_micro_batches
from echo_hub.learner.logprobs import exact, logits_in_chunks
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout
from echo_hub.verify.emulation import Packing, emulating, exactly
from echo_shared.errors import LearnerError
from echo_shared.sampling import draws
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.sampling.torch_sampler import sample_groups

COMPLETION_TOKENS: Final = 64
"""Maximum number of tokens of each completion on which roundings are measured."""
TOGETHER: Final = 16
"""Minimum number of prompts completed in one batch. Short completions take more prompts: a forward pass of a small
model has a fixed cost."""
POSITIONS: Final = 256
"""Number of positions (tokens) to measure. Batches of prompts are completed until it is reached or no prompts are left.

Rounding errors differ strongly between prompts, so variety of prompts matters more than the number of completions per
prompt. With 128 positions of 16 prompts or more, the scales of eight random selections lay within one step of
`likelihood.SCALES` (SmolLM2-135M-Instruct; emulated bf16, q8_0, q4_k_m). A hub on two cores computes for 14 s, and
checks wait for it."""
EXACT_ELEMENTS: Final = 2**22
"""Maximum number of logits held in float64 at a time. Several such tensors exist, of 32 MiB each."""
DRAWS: Final = 32
"""Number of tokens drawn at each position. More draws show better how far rounding has moved the edges between tokens
in cumulative probability."""


def contexts(
    policy: Policy, settings: LearnerSettings, prompts: Sequence[NDArray[np.int32]], *, seed: int
) -> list[WeightedGroup]:
    """Complete as many of `prompts` as POSITIONS needs, with the policy's current weights. The same seed gives the same
    completions.

    Raises LearnerError if there are no prompts, and BackendError if the policy's logits are not finite.
    """
    requests = [
        GroupRequest(
            lease_id=number,
            group_id=number,
            indices=(0,),
            prompt_ids=prompt_ids,
            seed=draws.derive_seed("numerics", seed, number),
            policy_version=0,
            temperature=settings.temperature,
            max_tokens=min(COMPLETION_TOKENS, settings.max_tokens),
            stop_ids=settings.stop_ids,
        )
        for number, prompt_ids in enumerate(prompts)
    ]
    if not prompts:
        raise LearnerError("The rounding cannot be measured: the run has no prompts.")
    groups: list[WeightedGroup] = []
    num_positions = 0
    while requests and num_positions < POSITIONS:
        each = num_positions / len(groups) if groups else requests[0].max_tokens
        number = min(math.ceil((POSITIONS - num_positions) / each), _most_together(requests))
        together, requests = requests[:number], requests[number:]
        with torch.no_grad(), policy.autocast():
            completed = {rollout.group_id: rollout for rollout in sample_groups(policy.model, together)}
        groups += [
            WeightedGroup(prompt_ids=one.prompt_ids, rollouts=(_with_all_tokens(completed[one.group_id]),))
            for one in together
        ]
        num_positions += sum(len(rollout.completion_ids) for rollout in completed.values())
    return groups


def _most_together(requests: Sequence[GroupRequest]) -> int:
    """Return how many prompts one batch may have. To fit into the device's memory, the batch has at most as many tokens
    as `TOGETHER` completions of the greatest length.
    """
    prompt_tokens = max(len(request.prompt_ids) for request in requests)
    return TOGETHER * (prompt_tokens + COMPLETION_TOKENS) // (prompt_tokens + requests[0].max_tokens)


def measured(
    policy: Policy,
    settings: LearnerSettings,
    rounding: str,
    groups: Sequence[WeightedGroup],
    *,
    adapter: Mapping[str, Tensor],
    seed: int,
    in_float32: bool = False,
    file: Packing | None = None,
) -> Evidence:
    """Return the evidence that an honest engine with this rounding and adapter would show on the completions in
    `groups`.

    `rounding` is one of `core.trust.numerics.ROUNDINGS`. For an engine that loads a GGUF file, it names the engine's
    precision, and `file` has the weights. `in_float32`: the verifier computes in float32, whatever the weights are
    stored in.
    """
    policy.set_adapter(adapter)
    generator = np.random.Generator(np.random.Philox(key=draws.derive_seed("numerics", rounding, seed)))
    found = []
    for batch in build_micro_batches(groups, micro_batch_tokens=settings.learner.tokens_at_once):
        moved = batch.to(policy.device)
        found += _examined(policy, settings.temperature, file or rounding, moved, generator, in_float32=in_float32)
    below_N, logprobs_N, uniforms_N, claims_N = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return Evidence.of(below_N, logprobs_N, uniforms_N, claims_N)


_Drawn = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
"""For each drawn token: lower end of the interval of cumulative probability that draws it, true log-probability,
uniform (random number), and claimed log-probability."""


def _examined(
    policy: Policy,
    temperature: float,
    engine: str | Packing,
    batch: MicroBatch,
    generator: np.random.Generator,
    *,
    in_float32: bool,
) -> list[_Drawn]:
    storages = policy.base_storages
    rounds_as_verifier = engine == EXACT_ROUNDING and (in_float32 or policy.is_float32)
    with exactly(in_float32=in_float32):
        hidden_NH = policy.states(batch)
    emulated_NH = hidden_NH
    if not rounds_as_verifier:
        with emulating(engine, storages):
            emulated_NH = policy.states(batch)
    true_chunks, drawn_chunks = logits_in_chunks(hidden_NH, policy.head), logits_in_chunks(emulated_NH, policy.head)
    found: list[_Drawn] = []
    while True:
        with torch.no_grad(), policy.autocast(), exactly(in_float32=in_float32):
            true_logits = next(true_chunks, None)
        if true_logits is None:
            return found
        drawn_logits = true_logits[1]
        if not rounds_as_verifier:
            with emulating(engine, storages):
                _, drawn_logits = next(drawn_chunks)
        rows = max(1, EXACT_ELEMENTS // drawn_logits.shape[1])
        for part in zip(true_logits[1].split(rows), drawn_logits.split(rows), strict=True):
            found.append(_drawn(*part, temperature, generator))


def _drawn(true_NV: Tensor, emulated_NV: Tensor, temperature: float, generator: np.random.Generator) -> _Drawn:
    """Draw tokens from the emulated logits and examine them under the true logits. N: positions, V: vocabulary, D:
    draws per position.

    Draws like `echo_shared.sampling.draws.draw`, with `DRAWS` uniforms per position: each distribution is summed only
    once.
    """
    true_NV, emulated_NV = (
        (exact(logits).double() / temperature).log_softmax(dim=1) for logits in (true_NV, emulated_NV)
    )
    uniforms_ND = torch.from_numpy(generator.random((len(true_NV), DRAWS))).to(true_NV.device)
    ids_ND = torch.searchsorted(emulated_NV.exp().cumsum(dim=1), uniforms_ND, right=True)
    ids_ND.clamp_(max=true_NV.shape[1] - 1)  # Rounding may leave the total below the uniform.
    claims_ND, logprobs_ND = emulated_NV.gather(1, ids_ND), true_NV.gather(1, ids_ND)
    below_ND = (true_NV.exp().cumsum(dim=1).gather(1, ids_ND) - logprobs_ND.exp()).clamp_(min=0.0)
    found = (below_ND, logprobs_ND, uniforms_ND, claims_ND)
    return tuple(values.numpy(force=True).ravel() for values in found)  # type: ignore[return-value]


def _with_all_tokens(rollout: FinishedRollout) -> WeightedRollout:
    count = len(rollout.completion_ids)
    return WeightedRollout(
        completion_ids=rollout.completion_ids,
        loss_mask=np.ones(count, bool),
        behavior_logprobs=rollout.behavior_logprobs,
        advantages=np.zeros(count),
        weight=0.0,
    )
