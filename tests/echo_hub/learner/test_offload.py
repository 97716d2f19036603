from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from echo_hub.learner.offload import Offload
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_hub.learner.step import make_optimizer, train_step
from echo_shared.sampling.interface import GroupRequest
from echo_shared.sampling.torch_sampler import sample_groups

MakeGroups = Callable[[int], list[TrainingGroup]]
REQUEST = GroupRequest(
    lease_id=1,
    group_id=1,
    indices=(0, 1, 2, 3),
    prompt_ids=np.array([3, 4], dtype=np.int32),
    seed=1,
    policy_version=1,
    temperature=0.8,
    max_tokens=6,
    stop_ids=(1,),
)


def alternating(
    settings: LearnerSettings, make_groups: MakeGroups, *, offloaded: bool
) -> tuple[Policy, torch.optim.Optimizer, list[list[int]]]:
    policy = Policy.load(settings)
    optimizer = make_optimizer(policy, settings.training)
    offload = Offload(optimizer, policy.device)
    drawn = []
    for step in range(3):
        offload.take_back()
        offload.take_back()
        train_step(policy, optimizer, make_groups(step), settings)
        if offloaded:
            offload.make_room()
            offload.make_room()
            assert all(parameter.grad is None for parameter in policy.parameters.values())
        drawn += [rollout.completion_ids.tolist() for rollout in sample_groups(policy.model, [REQUEST])]
    offload.take_back()
    return policy, optimizer, drawn


def test_sampling_in_between_changes_no_bit(settings: LearnerSettings, make_groups: MakeGroups) -> None:
    (one, its, drawn), (other, theirs, drawn_too) = (
        alternating(settings, make_groups, offloaded=offloaded) for offloaded in (False, True)
    )
    assert drawn == drawn_too
    for name, parameter in one.parameters.items():
        assert torch.equal(other.parameters[name], parameter), name
        for field, value in its.state[parameter].items():
            assert torch.equal(theirs.state[other.parameters[name]][field], value), (name, field)


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def test_the_state_leaves_and_comes_back_and_the_hosts_memory_is_used_again(
    settings: LearnerSettings, make_groups: MakeGroups
) -> None:
    policy = Policy.load(settings)
    optimizer = make_optimizer(policy, settings.training)
    offload = Offload(optimizer, policy.device)
    offload.make_room()  # Before the first step there is nothing to move.
    offload.take_back()
    train_step(policy, optimizer, make_groups(1), settings)
    on_device = state_of(optimizer)
    offload.make_room()
    away = state_of(optimizer)
    assert not any(one is other for one, other in zip(away, on_device, strict=True))
    offload.take_back()
    assert not any(one is other for one, other in zip(state_of(optimizer), away, strict=True))
    offload.make_room()
    assert all(one is other for one, other in zip(state_of(optimizer), away, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_the_state_waits_in_pinned_memory(
    make_settings: Callable[..., LearnerSettings], make_groups: MakeGroups
) -> None:
    settings = make_settings(learner={"device": "cuda"})
    policy = Policy.load(settings)
    optimizer = make_optimizer(policy, settings.training)
    offload = Offload(optimizer, policy.device)
    train_step(policy, optimizer, make_groups(1), settings)
    offload.make_room()
    assert all(value.is_pinned() for value in state_of(optimizer))
    offload.take_back()
    assert all(value.is_cuda for value in state_of(optimizer))
    train_step(policy, optimizer, make_groups(2), settings)
