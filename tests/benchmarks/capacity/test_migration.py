"""Completions that are cut at random places and continued must end like uncut ones; one changed token is detected."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from benchmarks.capacity.migration import cut
from benchmarks.harness.engine import sums
from echo_hub.run.base_files import resolve_base
from echo_shared.sampling.torch_sampler import sample_groups


def test_cut_completions_continue_to_the_same_end() -> None:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(resolve_base("builtin:tiny"), dtype=torch.float32).eval()
    groups = sums(10, seed=1, group_size=4)
    rollouts = list(sample_groups(model, groups))
    begun = cut(groups, rollouts, completions=25, rng=np.random.default_rng(1))
    assert len(begun.whole) == sum(len(request.indices) for request in begun.requests) == 25
    assert 25 <= begun.num_given < begun.num_tokens
    for request in begun.requests:
        assert request.indices == tuple(prefix.index for prefix in request.prefixes)
        for prefix in request.prefixes:
            whole = begun.whole[request.lease_id, prefix.index]
            assert 0 < len(prefix.ids) < len(whole.completion_ids)
            assert whole.completion_ids[: len(prefix.ids)].tolist() == prefix.ids.tolist()
    continued = list(sample_groups(model, begun.requests))
    assert begun.identical(continued) == 1
    first, *rest = continued
    changed = dataclasses.replace(first, completion_ids=first.completion_ids + np.int32(1))
    assert begun.identical([changed, *rest]) == 1 - 1 / 25
    assert begun.identical(rest) == 1 - 1 / 25
