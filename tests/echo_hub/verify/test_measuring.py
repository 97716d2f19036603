"""The verifier measures the rounding scale of an engine with few bits, here on a small model."""

from __future__ import annotations

import numpy as np
import pytest

from echo_hub.config.training_sections import LearnerConfig
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.judging import alarm
from echo_hub.core.trust.likelihood import SCALES
from echo_hub.core.trust.numerics import Numerics, NumericsClass
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings
from echo_hub.learner.weighting import WeightedGroup
from echo_hub.verify.measuring import COMPLETION_TOKENS, DRAWS, POSITIONS, TOGETHER, contexts, measured
from tests.echo_hub.core.trust.simulated import tokens_until
from tests.echo_hub.verify.conftest import MAX_TOKENS, Versions

PROMPTS = [np.random.default_rng(number).integers(2, 40, 3 + number % 3).astype(np.int32) for number in range(200)]


class Measured:
    """A verifier of one precision that measures version 1 on completions of `PROMPTS`."""

    def __init__(self, versions: Versions, precision: str) -> None:
        learner = LearnerConfig(device="cpu", threads=1, precision=precision)
        self.settings: LearnerSettings = versions.settings.model_copy(update={"learner": learner})
        self.policy = Policy.load(self.settings)
        self.adapter = self.policy.read_adapter(versions.directory.adapter(1))
        self.policy.set_adapter(self.adapter)
        self.groups = contexts(self.policy, self.settings, PROMPTS, seed=1)

    def __call__(self, rounding: str, seed: int = 1) -> Evidence:
        return measured(self.policy, self.settings, rounding, self.groups, adapter=self.adapter, seed=seed)


@pytest.fixture(scope="module")
def exact(versions: Versions) -> Measured:
    return Measured(versions, "float32")


def scales(shown: Evidence) -> tuple[float, float]:
    """Return the scales of draws and claims, in nats, that the hub would assume after this measurement."""
    numerics = Numerics()
    numerics.measured("q8_0", shown)
    honest = numerics.honest(NumericsClass("x", "q8_0"))
    return float(SCALES[honest.draws]), float(SCALES[honest.claims])


def num_positions(groups: list[WeightedGroup]) -> int:
    return sum(len(rollout.completion_ids) for group in groups for rollout in group.rollouts)


def test_prompts_are_completed_until_enough_positions_exist(exact: Measured) -> None:
    """A measurement needs some number of token positions. To save time, it completes few more prompts than that takes,
    and each prompt once.
    """
    assert all(len(group.rollouts) == 1 for group in exact.groups)
    assert TOGETHER < len(exact.groups) < len(PROMPTS)
    assert POSITIONS <= num_positions(exact.groups) < POSITIONS + MAX_TOKENS * MAX_TOKENS
    assert [group.prompt_ids.tolist() for group in exact.groups] == [
        prompt.tolist() for prompt in PROMPTS[: len(exact.groups)]
    ]
    assert MAX_TOKENS < COMPLETION_TOKENS


def test_of_few_prompts_all_are_completed(exact: Measured) -> None:
    found = contexts(exact.policy, exact.settings, PROMPTS[:3], seed=1)
    assert [len(group.rollouts) for group in found] == [1, 1, 1]
    assert exact.groups[0].rollouts[0].completion_ids.tolist() == found[0].rollouts[0].completion_ids.tolist()


def test_f32_of_a_float32_verifier_has_the_least_scale(exact: Measured) -> None:
    shown = exact("f32")
    assert shown.num_tokens == shown.num_claims == DRAWS * num_positions(exact.groups)
    assert shown.draws[0] == shown.claims[0] == shown.num_tokens
    assert scales(shown) == pytest.approx((SCALES[1], SCALES[1])), "the first scale, rounded up"


def test_few_bits_are_coarser_than_many(exact: Measured) -> None:
    found = [scales(exact(rounding)) for rounding in ("f16", "bf16", "q8_0", "q4_0")]
    assert found == sorted(found) and len(set(found)) >= 3
    assert found[-1][0] > 2 * found[-2][0], "four bits are far coarser than eight"


def test_a_bfloat16_verifier_finds_f32_coarser(versions: Versions, exact: Measured) -> None:
    """Honest nodes differ from the verifier by its own rounding too, so a measurement must include this rounding."""
    coarse = Measured(versions, "bfloat16")
    shown = coarse("f32")
    assert scales(shown)[1] > scales(exact("f32"))[1] and shown.claims[0] < shown.num_claims
    assert scales(coarse("q4_0"))[0] >= scales(exact("q4_0"))[0] / 1.5


def test_the_same_seed_gives_the_same_evidence(exact: Measured) -> None:
    again = contexts(exact.policy, exact.settings, PROMPTS, seed=1)
    for one, other in zip(again, exact.groups, strict=True):
        assert [rollout.completion_ids.tolist() for rollout in one.rollouts] == [
            rollout.completion_ids.tolist() for rollout in other.rollouts
        ]
    assert exact("q4_0") == exact("q4_0") != exact("q4_0", seed=2)


def test_an_honest_engine_of_the_rounding_is_not_convicted(exact: Measured) -> None:
    """Other samples than the measured ones must pass. An engine of four bits that reports eight must be convicted."""
    for rounding in ("f32", "bf16", "q8_0", "q4_0"):
        numerics = Numerics()
        numerics.measured("q8_0", exact(rounding))
        honest = numerics.honest(NumericsClass("x", "q8_0"))
        assert tokens_until(alarm(1e-6), honest, [exact(rounding, seed=seed) for seed in (2, 3)]) is None
    numerics.measured("q8_0", exact("q8_0"))
    assert tokens_until(alarm(1e-6), numerics.honest(NumericsClass("x", "q8_0")), [exact("q4_0")]) is not None
