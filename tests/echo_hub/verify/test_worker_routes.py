"""The verifier computes completions with the routes that their nodes returned."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.core.trust.evidence import Evidence
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.verify.drawn import DrawnRollout, unpack_spans
from echo_hub.verify.worker import Examiner
from echo_shared.records.rollout import DrawnSpan
from echo_shared.sampling import torch_routes
from echo_shared.sampling.interface import GroupRequest
from echo_shared.sampling.torch_sampler import sample_groups
from tests.echo_hub.verify.conftest import as_drawn
from tests.families import make_tiny

pytestmark = pytest.mark.usefixtures("_one_thread")


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> LearnerSettings:
    return LearnerSettings(
        base_dir=make_tiny("qwen3_moe", tmp_path_factory.mktemp("base")),
        seed=3,
        temperature=1.0,
        max_tokens=16,
        stop_ids=(),
        training=TrainingConfig(lora_rank=4, lora_alpha=8),
        learner=LearnerConfig(device="cpu", threads=1),
    )


@pytest.fixture(scope="module")
def drawn(settings: LearnerSettings) -> list[DrawnRollout]:
    """Return rollouts of an engine whose routers err a little, so that some of its routes differ from the
    verifier's.
    """
    coarse = Policy.load(settings)
    torch.manual_seed(6)
    for name, parameter in coarse.model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            parameter.data += 0.03 * parameter.std() * torch.randn_like(parameter)
    requests = [
        GroupRequest(
            lease_id=number,
            group_id=number,
            indices=(0, 1, 2, 3),
            prompt_ids=np.random.default_rng(number).integers(0, 128, 6).astype(np.int32),
            seed=number,
            policy_version=0,
            temperature=1.0,
            max_tokens=16,
            stop_ids=(),
            returns_routes=True,
        )
        for number in range(8)
    ]
    by_node = DrawnSpan(node_id="a", policy_version=0, num_tokens=0)
    rollouts = sample_groups(coarse.model, requests, routers=coarse.routers)
    return [as_drawn(rollout, requests[rollout.group_id], by_node) for rollout in rollouts]


def shown(settings: LearnerSettings, rollouts: list[DrawnRollout]) -> Evidence:
    examiner = Examiner(Policy.load(settings), settings, kept=1)
    found = [unpack_spans(frame["spans"])[0][1] for frame in examiner.examine(rollouts, dict[int, Path]())]
    assert len(found) == len(rollouts)
    return sum(found[1:], start=found[0])


def test_routes_of_an_honest_engine_explain_its_draws(settings: LearnerSettings, drawn: list[DrawnRollout]) -> None:
    assert all(len(one.routes) == 16 * 4 for one in drawn)
    replayed = shown(settings, drawn)
    plain = shown(settings, [replace(one, routes=b"") for one in drawn])
    assert replayed.num_tokens == plain.num_tokens == 8 * 4 * 16
    assert replayed.mismatch_kl < plain.mismatch_kl / 2
    assert sum(replayed.claims[3:]) < sum(plain.claims[3:]) / 2, "fewer claims are off by more than .2 nats"


def test_routes_that_rounding_cannot_explain_are_not_followed(
    settings: LearnerSettings, drawn: list[DrawnRollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node returns the routes of other completions. The verifier may follow such a route only where two experts are
    nearly tied."""
    routes = [one.routes for one in drawn]
    swapped = [replace(one, routes=other) for one, other in zip(drawn, [*routes[5:], *routes[:5]], strict=True)]
    lying = shown(settings, swapped)
    monkeypatch.setattr(torch_routes, "MARGIN", 1e9)
    followed = shown(settings, swapped)
    assert lying.mismatch_kl < followed.mismatch_kl / 10
    assert sum(lying.draws[3:]) < sum(followed.draws[3:]) / 3, "fewer draws are off by more than .2 nats"


@pytest.mark.parametrize("routes", [b"a", bytes(16 * 5), bytes(16 * 2)], ids=len)
def test_routes_of_another_size_are_ignored(
    settings: LearnerSettings, drawn: list[DrawnRollout], routes: bytes
) -> None:
    plain = shown(settings, [replace(one, routes=b"") for one in drawn])
    assert shown(settings, [replace(one, routes=routes) for one in drawn]) == plain
