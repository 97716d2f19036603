"""Packed micro-batches with routes must compute what one pass for each rollout with its routes computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.harness.plain_losses import largest_error
from echo_hub.learner import packing, routing
from echo_hub.learner.batch import MicroBatch, build_micro_batches
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import train_step
from echo_hub.learner.weighting import WeightedGroup, WeightedRollout
from echo_shared.sampling import torch_routes
from echo_shared.sampling.torch_routes import Replay
from echo_shared.wire.messages import NO_ROUTE, FinishReason
from tests.families import make_tiny

Make = Callable[..., LearnerSettings]
VOCABULARY = 128
EXPERTS = 4


@pytest.fixture(scope="module", params=["qwen3_moe", "gpt_oss"])
def base_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(autouse=True)
def _any_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_routes, "MARGIN", 1e9)


def some_routes(rng: np.random.Generator, tokens: int) -> bytes:
    """Return two different experts for each token and each of two layers; the last token has none."""
    known = np.array([rng.permutation(EXPERTS)[:2] for _ in range((tokens - 1) * 2)], np.uint8).tobytes()
    return known + bytes([NO_ROUTE] * 4)


def rollout(rng: np.random.Generator, tokens: int, *, has_routes: bool = True) -> WeightedRollout:
    return WeightedRollout(
        completion_ids=rng.integers(0, VOCABULARY, tokens).astype(np.int32),
        loss_mask=np.ones(tokens, bool),
        behavior_logprobs=np.zeros(tokens, np.float32),
        advantages=np.ones(tokens),
        weight=1.0,
        routes=some_routes(rng, tokens) if has_routes else b"",
    )


def groups_of(seed: int) -> list[WeightedGroup]:
    rng = np.random.default_rng(seed)
    return [
        WeightedGroup(
            prompt_ids=rng.integers(0, VOCABULARY, 3 + number).astype(np.int32),
            rollouts=tuple(rollout(rng, tokens, has_routes=tokens != 5) for tokens in (7, 5, 2, 7)),
        )
        for number in range(2)
    ]


def one_by_one(policy: Policy, groups: Sequence[WeightedGroup]) -> Tensor:
    """Return the log-probabilities of all tokens, each rollout computed by itself with its routes."""
    routers, found = policy.routers, []
    assert routers is not None
    for group in groups:
        for one in group.rollouts:
            ids = torch.from_numpy(np.concatenate([group.prompt_ids, one.completion_ids]).astype(np.int64))
            routes = torch.full((len(ids) - 1, routers.num_layers, routers.top_k), NO_ROUTE, dtype=torch.uint8)
            if one.routes:
                own = torch.frombuffer(bytearray(one.routes), dtype=torch.uint8).unflatten(0, (-1, *routes.shape[1:]))
                routes[len(group.prompt_ids) :] = own[:-1]
            with routers.replaying(Replay(routes)):
                logits = policy.model(input_ids=ids[None, :-1]).logits[0]
            logprobs = (logits.float() / 0.8).log_softmax(-1)
            first = len(group.prompt_ids)
            found.append(logprobs[first - 1 :].gather(1, ids[first:, None])[:, 0])
    return torch.cat(found)


def trained(policy: Policy) -> Policy:
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return policy


def test_routes_by_hand() -> None:
    rows = routing.RouteRows()
    rows.skip(2)
    rows.add(b"abcdef", 3, 2)
    rows.add(b"", 4, 1)
    routes = rows.together()
    assert routes is not None and routes.tolist() == [[255, 255]] * 2 + [[97, 98], [99, 100]] + [[255, 255]]
    nothing = routing.RouteRows()
    nothing.skip(3)
    nothing.add(b"", 2, 1)
    assert nothing.together() is None


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "row by row"])
def test_packed_rows_follow_their_own_routes(make_settings: Make, packs: bool) -> None:
    policy, groups = trained(Policy.load(make_settings())), groups_of(1)
    if not packs:
        policy._packs_up_to = 0
    (batch,) = build_micro_batches(groups, micro_batch_tokens=10_000)
    found = policy.logprobs(batch)
    expected = one_by_one(policy, groups)
    assert torch.allclose(found, expected, rtol=0, atol=1e-5)
    without = policy.logprobs(replace(batch, routes_TB=None))
    assert (found - without).abs().max() > 1e-2, "the routes matter"
    gradients = []
    for logprobs in (found, expected):
        for parameter in policy.parameters.values():
            parameter.grad = None
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        gradients.append({name: cast(Tensor, parameter.grad) for name, parameter in policy.parameters.items()})
    for name, ours in gradients[0].items():
        assert largest_error({name: ours}, {name: gradients[1][name]}) < 1e-5, name


def test_a_checkpointed_layer_computes_again_with_the_same_routes(make_settings: Make) -> None:
    found = []
    for checkpoints in (True, False):
        policy = trained(Policy.load(make_settings(learner={"gradient_checkpointing": checkpoints})))
        (batch,) = build_micro_batches(groups_of(3), micro_batch_tokens=10_000)
        policy.logprobs(batch).sum().backward()
        found.append([parameter.grad for parameter in policy.parameters.values()])
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None and torch.equal(ours, theirs)


def training_groups(change: Callable[[TrainingRollout], TrainingRollout]) -> list[TrainingGroup]:
    rng = np.random.default_rng(5)
    rollouts = [
        TrainingRollout(
            completion_ids=rng.integers(0, VOCABULARY, 6).astype(np.int32),
            behavior_logprobs=np.full(6, -4.0, np.float32),
            finish_reason=FinishReason.STOP,
            sampling_s=0.0,
            routes=some_routes(rng, 6),
            loss_mask=np.ones(6, bool),
            reward=float(number % 2),
        )
        for number in range(4)
    ]
    return [TrainingGroup(prompt_ids=np.arange(4, dtype=np.int32), rollouts=tuple(map(change, rollouts)))]


def test_a_step_replays_routes_and_ignores_those_of_another_size(make_settings: Make) -> None:
    def step(change: Callable[[TrainingRollout], TrainingRollout]) -> float:
        policy = trained(Policy.load(make_settings()))
        optimizer = torch.optim.SGD(policy.parameters.values(), lr=0.0)
        return train_step(policy, optimizer, training_groups(change), make_settings())["mismatch_kl"]

    replayed = step(lambda one: one)
    plain = step(lambda one: replace(one, routes=b""))
    assert replayed != pytest.approx(plain, rel=1e-3)
    assert step(lambda one: replace(one, routes=one.routes[:-6])) == plain, "two layers of one expert"
    assert step(lambda one: replace(one, routes=bytes([NO_ROUTE]) * len(one.routes))) == pytest.approx(plain, abs=1e-6)


def test_a_batch_keeps_its_routes_for_a_part_of_its_groups() -> None:
    (batch,) = build_micro_batches(groups_of(1), micro_batch_tokens=10_000)
    part, _ = batch.of_groups([0])
    assert isinstance(part, MicroBatch) and part.routes_TB is batch.routes_TB
    assert batch.routes_TB is not None and len(batch.routes_TB) == len(batch.input_ids_T)
    assert packing.Rows is type(batch.rows)
