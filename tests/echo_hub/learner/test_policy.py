from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from echo_hub.learner.batch import build_micro_batches
from echo_hub.learner.grpo import group_advantages
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_shared.adapter import CONFIG_FILE, WEIGHTS_FILE, load_adapter
from echo_shared.errors import LearnerError

MakeGroups = Callable[[int], list[TrainingGroup]]


@pytest.fixture
def policy(settings: LearnerSettings) -> Policy:
    """With an adapter that is not zero."""
    policy = Policy.load(settings)
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(5))
    return policy


def naive_logprobs(policy: Policy, groups: list[TrainingGroup], temperature: float) -> Iterator[tuple[int, float]]:
    """(token, logprob) of every completion token, one unpadded sequence after the other, by the full softmax."""
    for group in groups:
        for rollout in group.rollouts:
            ids = np.concatenate([group.prompt_ids, rollout.completion_ids]).astype(np.int64)
            logits = policy.model(input_ids=torch.from_numpy(ids)[None]).logits[0].float() / temperature
            logprobs = logits.log_softmax(dim=-1)
            for position in range(len(group.prompt_ids), len(ids)):
                yield int(ids[position]), float(logprobs[position - 1, ids[position]])


@pytest.mark.parametrize("shared", [0, 16, 256])
def test_logprobs_are_those_of_each_sequence_alone(
    policy: Policy, make_groups: MakeGroups, settings: LearnerSettings, shared: int
) -> None:
    groups = make_groups(0)
    values = [group_advantages(np.array([r.reward for r in group.rollouts])) for group in groups]
    batches = build_micro_batches(groups, values, micro_batch_tokens=64, shared_row_tokens=shared)
    with torch.no_grad():
        found = [
            pair
            for batch in batches
            for pair in zip(batch.target_ids_N.tolist(), policy.logprobs(batch).tolist(), strict=True)
        ]
        with_advantage = [group for group, value in zip(groups, values, strict=True) if value.any()]
        expected = list(naive_logprobs(policy, with_advantage, settings.temperature))
    for (token, logprob), (expected_token, expected_logprob) in zip(sorted(found), sorted(expected), strict=True):
        assert token == expected_token
        assert logprob == pytest.approx(expected_logprob, abs=1e-5)


def test_what_stands_in_the_padding_changes_nothing(policy: Policy, make_groups: MakeGroups) -> None:
    groups = make_groups(0)
    values = [group_advantages(np.array([r.reward for r in group.rollouts])) for group in groups]
    for shared in (0, 256):
        (batch,) = build_micro_batches(groups, values, micro_batch_tokens=10_000, shared_row_tokens=shared)
        assert (batch.input_ids_BT == 0).any()
        before = policy.logprobs(batch)
        lengths = [len(group.prompt_ids) for group in groups]
        assert min(lengths) < batch.input_ids_BT.shape[1]
        padded = torch.ones_like(batch.input_ids_BT, dtype=torch.bool)
        padded.view(-1)[batch.predictors_N] = False
        if batch.segments_BT is not None:
            padded = batch.segments_BT == -1
        else:  # In a row of its own, what stands right of the last predictor is padding.
            padded &= padded.flip(1).cummin(dim=1).values.flip(1).bool()
        batch.input_ids_BT[padded] = 39
        assert torch.equal(policy.logprobs(batch), before)


def test_a_fresh_policy_is_the_base_and_the_seed_decides_it(settings: LearnerSettings) -> None:
    first, again = Policy.load(settings), Policy.load(settings)
    other = Policy.load(settings.model_copy(update={"seed": 4}))
    ids = torch.arange(8)[None]
    with torch.no_grad(), first.model.disable_adapter():
        base = first.model(input_ids=ids).logits
    with torch.no_grad():
        assert torch.equal(first.model(input_ids=ids).logits, base)
    pairs = zip(first.parameters.values(), again.parameters.values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    assert any(not torch.equal(a, b) for a, b in zip(first.parameters.values(), other.parameters.values(), strict=True))


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_peft_loads_the_saved_adapter(policy: Policy, base_dir: Path, tmp_path: Path) -> None:
    policy.save_adapter(tmp_path)
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base_dir), str(tmp_path))
    ids = torch.arange(8)[None]
    with torch.no_grad():
        torch.testing.assert_close(loaded(input_ids=ids).logits, policy.model(input_ids=ids).logits)


def test_engines_accept_the_saved_adapter(policy: Policy, tmp_path: Path) -> None:
    policy.save_adapter(tmp_path)
    assert len(load_adapter(tmp_path).modules) == 14
    config = json.loads((tmp_path / CONFIG_FILE).read_text())
    assert config["base_model_name_or_path"] == "tiny"
    assert str(tmp_path.parent) not in (tmp_path / CONFIG_FILE).read_text()


def test_save_is_deterministic_and_load_gives_the_same_bits(
    policy: Policy, settings: LearnerSettings, tmp_path: Path
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    policy.save_adapter(first)
    other = Policy.load(settings)
    other.load_adapter(first)
    other.save_adapter(second)
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_holding_puts_the_own_adapter_back(policy: Policy, settings: LearnerSettings, tmp_path: Path) -> None:
    Policy.load(settings).save_adapter(tmp_path)
    before = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    with policy.holding(tmp_path):
        held = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    stored = load_file(tmp_path / WEIGHTS_FILE)
    assert all(torch.equal(held[name], stored[name]) for name in stored)
    assert all(torch.equal(policy.parameters[name], before[name]) for name in before)


def test_an_adapter_of_another_rank_is_refused(
    policy: Policy, make_settings: Callable[..., LearnerSettings], tmp_path: Path
) -> None:
    Policy.load(make_settings(lora_rank=2)).save_adapter(tmp_path)
    with pytest.raises(LearnerError, match="does not fit"):
        policy.load_adapter(tmp_path)


def test_a_missing_base_is_a_clear_error(settings: LearnerSettings, tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="base model cannot be loaded"):
        Policy.load(settings.model_copy(update={"base_dir": tmp_path / "nothing"}))


def test_a_base_with_processed_logits_is_refused(settings: LearnerSettings, base_dir: Path, tmp_path: Path) -> None:
    capped = tmp_path / "capped"
    shutil.copytree(base_dir, capped)
    config = json.loads((capped / "config.json").read_text())
    (capped / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 30.0}))
    with pytest.raises(LearnerError, match="changes its logits"):
        Policy.load(settings.model_copy(update={"base_dir": capped}))
