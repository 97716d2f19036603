from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from echo_hub.learner import lora
from echo_hub.learner.batch import MicroBatch, build_micro_batches
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup
from echo_hub.learner.weighting import WeightedGroup, weigh
from echo_shared.delta.adapter import CONFIG_FILE, WEIGHTS_FILE, load_adapter
from echo_shared.errors import LearnerError

MakeGroups = Callable[[int], list[TrainingGroup]]
CPUINFO = Path("/proc/cpuinfo")
LOAD = """
import sys
from echo_shared.process.importing import do_without
do_without("bitsandbytes", "scipy")  # They take as long to import as all else here.
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings

for text in sys.argv[1:]:
    print(next(Policy.load(LearnerSettings.model_validate_json(text)).model.parameters()).dtype)
    print("--", file=sys.stderr)
"""


@pytest.fixture
def policy(settings: LearnerSettings) -> Policy:
    """Return a policy whose adapter changes its outputs; a fresh adapter would not, as its matrix B is 0."""
    return randomised(Policy.load(settings))


def kept_elements(policy: Policy, batch: MicroBatch) -> int:
    """Return the number of elements that the forward pass keeps for the backward pass."""
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        policy.logprobs(batch)
    return sum(sizes)


def unpacked(policy: Policy) -> Policy:
    """Return a copy of the policy that packs no two sequences into one row, as a model with an attention window of one
    token would."""
    twin = copy(policy)
    twin._packs_up_to = 1
    return twin


def naive_logprobs(policy: Policy, groups: list[WeightedGroup], temperature: float) -> Iterator[tuple[int, float]]:
    """Yield (token, log-probability) of every completion token, by the full softmax of one unpadded sequence at a
    time.
    """
    for group in groups:
        for rollout in group.rollouts:
            ids = np.concatenate([group.prompt_ids, rollout.completion_ids]).astype(np.int64)
            logits = policy.model(input_ids=torch.from_numpy(ids)[None]).logits[0].float() / temperature
            logprobs = logits.log_softmax(dim=-1)
            for position in range(len(group.prompt_ids), len(ids)):
                yield int(ids[position]), float(logprobs[position - 1, ids[position]])


def weighted(groups: list[TrainingGroup], settings: LearnerSettings) -> list[WeightedGroup]:
    return weigh(groups, settings).updates[0]


def gradient(policy: Policy, batches: list[MicroBatch]) -> torch.Tensor:
    policy.model.zero_grad(set_to_none=True)
    for batch in batches:
        torch.autograd.backward((policy.logprobs(batch) * batch.advantages_N).sum())
    return torch.cat([p.grad.flatten() for p in policy.parameters.values() if p.grad is not None])


def randomised(policy: Policy) -> Policy:
    with torch.no_grad():
        for parameter in policy.parameters.values():
            parameter.normal_(std=0.1, generator=torch.Generator().manual_seed(5))
    return policy


def own_bytes() -> int:
    """Return the memory of this process that no file backs, so that other processes cannot share it."""
    gc.collect()
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return 1024 * int(line.split()[1])


@pytest.mark.parametrize("packed", [True, False])
def test_logprobs_equal_those_of_each_sequence_alone(
    policy: Policy, make_groups: MakeGroups, settings: LearnerSettings, packed: bool
) -> None:
    policy = policy if packed else unpacked(policy)
    groups = weighted(make_groups(0), settings)
    batches = build_micro_batches(groups, micro_batch_tokens=64)
    assert len(batches) > 1
    with torch.no_grad():
        found = [
            pair
            for batch in batches
            for pair in zip(batch.target_ids_N.tolist(), policy.logprobs(batch).tolist(), strict=True)
        ]
        expected = list(naive_logprobs(policy, groups, settings.temperature))
    for (token, logprob), (expected_token, expected_logprob) in zip(sorted(found), sorted(expected), strict=True):
        assert token == expected_token
        assert logprob == pytest.approx(expected_logprob, abs=1e-5)


@pytest.mark.parametrize("packed", [True, False])
def test_the_intervals_of_draws_come_with_the_log_probabilities(
    policy: Policy, make_groups: MakeGroups, settings: LearnerSettings, packed: bool
) -> None:
    policy = policy if packed else unpacked(policy)
    for batch in build_micro_batches(weighted(make_groups(0), settings), micro_batch_tokens=64):
        below_N, logprobs_N = policy.intervals(batch, adapters=[(policy.published(), len(batch.input_ids_T))])
        torch.testing.assert_close(logprobs_N.float(), policy.logprobs(batch).detach(), atol=1e-5, rtol=1e-5)
        with torch.no_grad():
            probabilities_NV = (policy.head(policy.states(batch)).double() / settings.temperature).softmax(dim=-1)
        before_NV = torch.arange(probabilities_NV.shape[1]) < batch.target_ids_N[:, None]
        torch.testing.assert_close(below_N, (probabilities_NV * before_NV).sum(dim=1), atol=1e-6, rtol=0)


def test_packed_or_not_the_gradient_is_the_same(
    policy: Policy, make_groups: MakeGroups, settings: LearnerSettings
) -> None:
    groups = weighted(make_groups(0) + make_groups(1), settings)
    whole = gradient(policy, build_micro_batches(groups, micro_batch_tokens=100_000))
    scale = whole.abs().max()
    for tokens in (20, 64, 100_000):
        batches = build_micro_batches(groups, micro_batch_tokens=tokens)
        for found in (gradient(policy, batches), gradient(unpacked(policy), batches)):
            torch.testing.assert_close(found / scale, whole / scale, atol=1e-6, rtol=0)


def test_the_rest_of_a_row_changes_nothing(policy: Policy, make_groups: MakeGroups, settings: LearnerSettings) -> None:
    (batch,) = build_micro_batches(weighted(make_groups(0), settings), micro_batch_tokens=10_000)
    rows = batch.rows
    places = rows.laid_out.index.clone()
    behind = torch.cat(
        [(positions == positions.roll(1, dims=1)).cumsum(dim=1).bool().flatten() for positions in rows.split(places)]
    )
    assert behind.any(), "some rows are shorter than others in their batch"
    places[behind] = 0
    other = replace(batch, rows=replace(rows, laid_out=replace(rows.laid_out, index=places)))
    for each in (policy, unpacked(policy)):
        assert torch.equal(each.logprobs(other), each.logprobs(batch))


def test_rows_longer_than_a_window_see_no_further(
    make_groups: MakeGroups, settings: LearnerSettings, base_dir: Path, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(
        base_dir, use_sliding_window=True, sliding_window=10, layer_types=["sliding_attention", "full_attention"]
    )
    base.save_pretrained(tmp_path)
    policy = randomised(Policy.load(settings.model_copy(update={"base_dir": tmp_path})))
    groups = weighted(make_groups(0), settings)
    batches = build_micro_batches(groups, micro_batch_tokens=20)
    lengths = [batch.rows.longest for batch in batches]
    assert min(lengths) <= 10 < max(lengths)
    with torch.no_grad():
        found = sorted(float(value) for batch in batches for value in policy.logprobs(batch))
        expected = sorted(value for _, value in naive_logprobs(policy, groups, settings.temperature))
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_reference_logprobs_are_the_bases(policy: Policy, make_groups: MakeGroups, settings: LearnerSettings) -> None:
    (batch,) = build_micro_batches(weighted(make_groups(0), settings), micro_batch_tokens=10_000)
    found = policy.reference_logprobs(batch)
    assert not found.requires_grad
    torch.testing.assert_close(found, Policy.load(settings).logprobs(batch).detach())
    assert not torch.allclose(policy.logprobs(batch), found)


def test_the_reference_may_be_an_adapter(policy: Policy, make_groups: MakeGroups, settings: LearnerSettings) -> None:
    (batch,) = build_micro_batches(weighted(make_groups(0), settings), micro_batch_tokens=10_000)
    own = policy.published()
    by_own = policy.logprobs(batch).detach()
    policy.reference = {name: weight * 2 for name, weight in own.items()}
    found = policy.reference_logprobs(batch)
    assert not found.requires_grad and not torch.allclose(found, by_own)
    torch.testing.assert_close(policy.logprobs(batch).detach(), by_own, msg="the policy is what it was")
    policy.reference = own
    torch.testing.assert_close(policy.reference_logprobs(batch), by_own)


def test_layers_that_are_computed_again_give_the_same_gradient(
    policy: Policy, make_groups: MakeGroups, make_settings: Callable[..., LearnerSettings]
) -> None:
    settings = make_settings(learner={"gradient_checkpointing": True})
    batches = build_micro_batches(weighted(make_groups(0), settings), micro_batch_tokens=64)
    again = randomised(Policy.load(settings))
    kept = {each: kept_elements(each, batches[0]) for each in (policy, again)}
    assert kept[again] < kept[policy] / 2
    assert torch.equal(gradient(again, batches), gradient(policy, batches))


def test_bfloat16_is_close_to_float32(
    policy: Policy, make_groups: MakeGroups, make_settings: Callable[..., LearnerSettings]
) -> None:
    settings = make_settings(learner={"precision": "bfloat16"})
    batches = build_micro_batches(weighted(make_groups(0), settings), micro_batch_tokens=10_000)
    half = randomised(Policy.load(settings))
    assert next(half.model.parameters()).dtype == torch.bfloat16
    assert {parameter.dtype for parameter in half.parameters.values()} == {torch.float32}
    logprobs = half.logprobs(batches[0])
    assert logprobs.dtype == torch.float32
    assert (logprobs - policy.logprobs(batches[0])).abs().mean() < 0.05
    exact = gradient(policy, batches)
    assert (gradient(half, batches) - exact).norm() < 0.05 * exact.norm()


@pytest.mark.skipif(not CPUINFO.exists() or " avx2 " not in CPUINFO.read_text(), reason="this processor has no AVX2")
def test_bfloat16_on_a_processor_without_it_is_reported(make_settings: Callable[..., LearnerSettings]) -> None:
    settings = [make_settings(learner={"precision": name}) for name in ("bfloat16", "float32", "auto")]
    run = subprocess.run(
        [sys.executable, "-c", LOAD, *(one.model_dump_json() for one in settings)],
        env={**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["torch.bfloat16", "torch.float32", "torch.float32"]
    told = ["This processor cannot multiply bfloat16" in said for said in run.stderr.split("--\n")]
    assert told == [True, False, False, False]


def test_eight_bits_are_close_to_all(
    policy: Policy, make_groups: MakeGroups, make_settings: Callable[..., LearnerSettings]
) -> None:
    pytest.importorskip("bitsandbytes")
    settings = make_settings(learner={"base_bits": 8})
    batches = build_micro_batches(weighted(make_groups(0), settings), micro_batch_tokens=10_000)
    small = randomised(Policy.load(settings))
    assert sum(parameter.dtype == torch.int8 for parameter in small.model.parameters()) == 14
    exact = gradient(policy, batches)
    assert (gradient(small, batches) - exact).norm() < 0.1 * exact.norm()


def test_four_bits_train_like_their_dequantized_weights(
    policy: Policy, make_groups: MakeGroups, make_settings: Callable[..., LearnerSettings]
) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    settings = make_settings(learner={"base_bits": 4})
    batches = build_micro_batches(weighted(make_groups(0), settings), micro_batch_tokens=10_000)
    small = randomised(Policy.load(settings))
    plain = dict(policy.model.named_modules())
    replaced = 0
    for name, module in small.model.named_modules():
        if isinstance(module, bitsandbytes.nn.Linear4bit):
            weight = module.weight
            plain[name].weight.data = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
            replaced += 1
    assert replaced == 14
    expected = gradient(policy, batches)
    scale = expected.abs().max()
    torch.testing.assert_close(gradient(small, batches) / scale, expected / scale, atol=1e-4, rtol=0)
    small.reference_logprobs(batches[0])
    found = gradient(small, batches)
    torch.testing.assert_close(found / scale, expected / scale, atol=1e-4, rtol=0)


def test_without_bitsandbytes_fewer_bits_are_a_clear_error(
    make_settings: Callable[..., LearnerSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.quantizers.quantizer_bnb_8bit.is_bitsandbytes_available", lambda: False)
    with pytest.raises(LearnerError, match="quantised form"):
        Policy.load(make_settings(learner={"base_bits": 8}))


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


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs the books of Linux")
def test_a_base_in_its_own_precision_is_memory_mapped(settings: LearnerSettings, tmp_path: Path) -> None:
    """Processes of one host share the memory of a mapped file, so opening the base must not copy it."""
    config = Qwen3Config(
        vocab_size=60_000,
        hidden_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        head_dim=8,
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))

    def taken(precision: str) -> int:
        learner = settings.learner.model_copy(update={"precision": precision})
        before = own_bytes()
        policy = Policy.load(settings.model_copy(update={"base_dir": tmp_path, "learner": learner}))
        return own_bytes() - before if policy else 0

    assert taken("bfloat16") < size / 4
    assert taken("float32") > size, "another precision needs a copy"


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
    other.set_adapter(other.read_adapter(first))
    other.save_adapter(second)
    for name in (WEIGHTS_FILE, CONFIG_FILE):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def nearest_bfloat16(weight: torch.Tensor) -> torch.Tensor:
    """Round to nearest, ties to even, by the bits of float32."""
    bits = weight.detach().numpy().view(np.uint32).astype(np.uint64)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return torch.from_numpy(rounded.astype(np.uint32).view(np.float32))


def test_published_weights_are_rounded_and_trained_ones_are_not(
    make_settings: Callable[..., LearnerSettings], tmp_path: Path
) -> None:
    policy = randomised(Policy.load(make_settings(publish_precision="bfloat16")))
    with torch.no_grad():  # Ties; the even neighbour is below the first and above the second value.
        next(iter(policy.parameters.values())).view(-1)[:2].copy_(torch.tensor([1 + 2**-8, 1 + 3 * 2**-8]))
    before = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    policy.save_adapter(tmp_path, policy.published())
    assert {weight.dtype for weight in load_file(tmp_path / WEIGHTS_FILE).values()} == {torch.bfloat16}
    found = policy.read_adapter(tmp_path)
    for name, weight in before.items():
        assert torch.equal(policy.parameters[name], weight), name
        assert found[name].dtype == torch.float32
        assert torch.equal(found[name], nearest_bfloat16(weight)), name
        assert not torch.equal(found[name], weight), name
    scaling = 8 / 4
    for module in load_adapter(tmp_path).modules:
        name = f"base_model.model.{module.path}.lora_"
        np.testing.assert_array_equal(module.a, found[f"{name}A.weight"].numpy())
        np.testing.assert_array_equal(module.b, found[f"{name}B.weight"].numpy() * scaling)


@pytest.mark.parametrize(
    ("publish", "precision", "expected"),
    [
        ("auto", "auto", torch.float32),
        ("auto", "bfloat16", torch.bfloat16),
        ("float32", "bfloat16", torch.float32),
        ("bfloat16", "float32", torch.bfloat16),
    ],
)
def test_published_as_computed_unless_told(
    make_settings: Callable[..., LearnerSettings], publish: str, precision: str, expected: torch.dtype
) -> None:
    policy = Policy.load(make_settings(publish_precision=publish, learner={"precision": precision}))
    assert {weight.dtype for weight in policy.published().values()} == {expected}


def test_a_learner_that_computes_in_bfloat16_loses_nothing_by_publishing_in_it(
    make_groups: MakeGroups, make_settings: Callable[..., LearnerSettings]
) -> None:
    settings = make_settings(learner={"precision": "bfloat16"})
    policy = randomised(Policy.load(settings))
    (batch,) = build_micro_batches(weighted(make_groups(0), settings), micro_batch_tokens=10_000)
    own = policy.logprobs(batch).detach()
    with policy.holding(policy.published()):
        assert torch.equal(policy.logprobs(batch), own)


def test_holding_puts_the_own_adapter_back(policy: Policy, settings: LearnerSettings, tmp_path: Path) -> None:
    Policy.load(settings).save_adapter(tmp_path)
    before = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    with policy.holding(policy.read_adapter(tmp_path)):
        held = {name: parameter.detach().clone() for name, parameter in policy.parameters.items()}
    stored = load_file(tmp_path / WEIGHTS_FILE)
    assert all(torch.equal(held[name], stored[name]) for name in stored)
    assert all(torch.equal(policy.parameters[name], before[name]) for name in before)


@pytest.mark.parametrize("training", [{"lora_rank": 2}, {"lora_targets": "mlp"}], ids=str)
def test_an_adapter_of_another_shape_is_refused(
    policy: Policy, make_settings: Callable[..., LearnerSettings], tmp_path: Path, training: dict[str, Any]
) -> None:
    Policy.load(make_settings(training=training)).save_adapter(tmp_path)
    with pytest.raises(LearnerError, match=r"(?s)does not fit.*lora_targets"):
        policy.read_adapter(tmp_path)


def test_the_adapter_is_on_the_layers_that_are_named_and_scaled_as_named(
    make_settings: Callable[..., LearnerSettings],
) -> None:
    policy = Policy.load(make_settings(training={"lora_targets": "attention", "rslora": True}))
    assert {name.split(".")[-3] for name in policy.parameters} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert {layer.scaling["default"] for layer in lora.layers(policy.model).values()} == {8 / 4**0.5}


def test_a_base_without_such_layers_is_a_clear_error(
    make_settings: Callable[..., LearnerSettings], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(LearnerError, match="no layer for the adapter"):
        Policy.load(make_settings().model_copy(update={"base_dir": tmp_path}))


def test_a_missing_base_is_a_clear_error(settings: LearnerSettings, tmp_path: Path) -> None:
    with pytest.raises(LearnerError, match="base model cannot be loaded"):
        Policy.load(settings.model_copy(update={"base_dir": tmp_path / "nothing"}))


def test_logits_that_the_model_does_not_cap_are_refused(
    settings: LearnerSettings, base_dir: Path, tmp_path: Path
) -> None:
    """Qwen3 ignores this setting of other families, so that its logits are not what the setting says."""
    capped = tmp_path / "capped"
    shutil.copytree(base_dir, capped)
    config = json.loads((capped / "config.json").read_text())
    (capped / "config.json").write_text(json.dumps({**config, "final_logit_softcapping": 1.0}))
    with pytest.raises(LearnerError, match="does not know how this base model computes its logits"):
        Policy.load(settings.model_copy(update={"base_dir": capped}))


def test_a_named_layer_that_the_base_lacks_is_a_clear_error(make_settings: Callable[..., LearnerSettings]) -> None:
    with pytest.raises(
        LearnerError, match=r"(?s)without qkv_proj in the base.*layers of this base model \(down_proj, "
    ):
        Policy.load(make_settings(training={"lora_targets": "q_proj,qkv_proj"}))


def test_the_adapters_configuration_names_the_layers_of_the_base(policy: Policy, tmp_path: Path) -> None:
    policy.save_adapter(tmp_path)
    named = json.loads((tmp_path / CONFIG_FILE).read_text())["target_modules"]
    assert named == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]


def test_a_base_of_images_and_text_is_refused(settings: LearnerSettings, tmp_path: Path) -> None:
    text = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(text_config={**text, **heads}, vision_config={**vision, "image_size": 28, "patch_size": 14})
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)
    with pytest.raises(LearnerError, match=r"(?s)not a causal model of text alone.*gemma3.*docs/models\.md"):
        Policy.load(settings.model_copy(update={"base_dir": tmp_path}))
