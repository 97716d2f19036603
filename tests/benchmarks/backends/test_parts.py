"""The benchmark's comparison of an engine with the reference (transformers and PEFT in float32) accepts the engine's
samples, and detects a single changed token.
"""

from __future__ import annotations

import dataclasses
from itertools import chain

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.backends.parts import Reference
from benchmarks.harness.engine import sums
from echo_hub.run.base_files import resolve_base
from echo_shared.sampling.torch_sampler import sample_groups


def test_identical_and_not() -> None:
    torch.set_num_threads(1)
    base = resolve_base("builtin:tiny")
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    groups = sums(4, seed=1)
    rollouts = list(sample_groups(model, groups))
    reference = Reference(base, None)
    identical, difference = reference.compare(groups, rollouts)
    assert identical == 1
    assert difference < 1e-4

    first, *rest = rollouts
    other_ids = first.completion_ids.copy()
    other_ids[0] = (other_ids[0] + 1) % 99
    changed = dataclasses.replace(first, completion_ids=other_ids)
    shifted = dataclasses.replace(rest[0], behavior_logprobs=rest[0].behavior_logprobs + np.float32(0.5))
    identical, difference = reference.compare(groups, [changed, shifted, *rest[1:]])
    assert identical == 1 - 1 / len(rollouts)
    assert difference > 0.4
    assert set(chain.from_iterable(group.indices for group in groups)) == set(range(8))
