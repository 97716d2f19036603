from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.harness.plain_losses import ModelsBench, a_request, computed, peft_of
from echo_hub.learner.models import files
from echo_hub.learner.models.training import TrainedModel
from echo_hub.run.base_files import resolve_base
from echo_hub.tenants.refusal import Refusal
from echo_hub.tenants.requests import AdamStep, LossFunction
from echo_shared.errors import LearnerError
from tests.echo_hub.learner.models.conftest import read_bytes

STEP = AdamStep(learning_rate=1e-2)


def train(bench: ModelsBench, model: TrainedModel, first: int, last: int) -> None:
    for seed in range(first, last):
        computed(bench, model, a_request(bench, LossFunction.CROSS_ENTROPY, seed=seed))
        model.step(STEP)


def test_training_goes_on_to_the_same_bits(bench: ModelsBench, tmp_path: Path) -> None:
    whole, half = bench.model(), bench.model()
    train(bench, whole, 0, 4)
    train(bench, half, 0, 2)
    files.save(half, bench.seat, tmp_path / "half", base="b")
    again = files.load_model(tmp_path / "half", bench.seat, base="b", optimizer=True)
    assert (again.steps, again.wish) == (2, half.wish)
    train(bench, again, 2, 4)
    for name, weight in whole.adapter.weights.items():
        assert torch.equal(weight, again.adapter.weights[name])
    files.save(whole, bench.seat, tmp_path / "a", base="b")
    files.save(again, bench.seat, tmp_path / "b", base="b")
    assert read_bytes(tmp_path / "a") == read_bytes(tmp_path / "b")


def test_without_the_optimizer_its_moments_start_afresh(bench: ModelsBench, tmp_path: Path) -> None:
    model = bench.model()
    train(bench, model, 0, 2)
    files.save(model, bench.seat, tmp_path / "m", base="b")
    again = files.load_model(tmp_path / "m", bench.seat, base="b", optimizer=False)
    assert again.steps == 0 and not again.optimizer.state
    for name, weight in model.adapter.weights.items():
        assert torch.equal(weight, again.adapter.weights[name])


def test_damaged_files_and_other_bases_are_refused(bench: ModelsBench, tmp_path: Path) -> None:
    model = bench.model()
    train(bench, model, 0, 1)

    def saved(name: str) -> Path:
        files.save(model, bench.seat, tmp_path / name, base="b")
        return tmp_path / name

    def refuses(directory: Path, said: str, base: str = "b") -> None:
        with pytest.raises(LearnerError, match=said):
            files.load_model(directory, bench.seat, base=base, optimizer=True)

    refuses(saved("whole"), "another base", base="c")
    for name in ("adapter_model.safetensors", "optimizer.safetensors"):
        directory = saved(name)
        data = bytearray((directory / name).read_bytes())
        data[-1] ^= 1
        (directory / name).write_bytes(data)
        refuses(directory, "missing or damaged")
        (directory / name).unlink()
        refuses(directory, "missing or damaged")
    refuses(tmp_path / "nothing", "missing or damaged")
    directory = saved("text")
    (directory / files.MARKER).write_text("[]")
    refuses(directory, "missing or damaged")
    marker = saved("other") / files.MARKER
    content = json.loads(marker.read_text())
    del content["files"]["adapter_model.safetensors"]
    marker.write_text(json.dumps(content))
    refuses(tmp_path / "other", "missing or damaged")


def test_an_existing_directory_is_replaced_as_a_whole(bench: ModelsBench, tmp_path: Path) -> None:
    first, second = bench.model(seed=1), bench.model(seed=2, rank=2)
    for model in (first, second):
        files.save(model, bench.seat, tmp_path / "m", base="b")
    assert files.load_model(tmp_path / "m", bench.seat, base="b", optimizer=True).wish.rank == 2
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_an_adapter_with_values_that_are_not_finite_is_not_exported(
    bench: ModelsBench, tmp_path: Path, value: float
) -> None:
    model = bench.model()
    with torch.no_grad():
        next(iter(model.adapter.weights.values()))[0, 0] = value
    with pytest.raises(Refusal, match="not finite"):
        files.export(model, bench.seat, tmp_path / "v", probe=bench.probe)
    assert list(tmp_path.iterdir()) == []


def test_an_export_gives_pefts_own_log_probabilities(bench: ModelsBench, tmp_path: Path) -> None:
    model = bench.model(rank=3, b_scale=0.3)
    train(bench, model, 0, 1)
    files.export(model, bench.seat, tmp_path / "v", probe=bench.probe)
    request = replace(a_request(bench, LossFunction.CROSS_ENTROPY, seed=7), forward_only=True)
    result, _ = computed(bench, model, request)
    peft_model = peft_of(bench, model, tmp_path / "plain")
    peft_model.load_adapter(tmp_path / "v", adapter_name="exported")
    peft_model.set_adapter("exported")
    for datum, found in zip(request.data, result.logprobs, strict=True):
        with torch.no_grad():
            logits = peft_model(input_ids=torch.from_numpy(datum.input_ids.astype(np.int64))[None]).logits[0]
        expected = logits.log_softmax(-1).gather(1, torch.from_numpy(datum.loss_inputs["target_tokens"])[:, None])
        np.testing.assert_allclose(found, expected[:, 0].numpy(), atol=1e-4)
    config = json.loads((tmp_path / "v" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 32)


def test_the_fingerprint_is_that_of_the_weights(tmp_path: Path) -> None:
    base, copy = resolve_base("builtin:tiny"), tmp_path / "copy"
    copy.mkdir()
    for path in base.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    fingerprint = files.base_fingerprint(base)
    assert files.base_fingerprint(copy) == fingerprint
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert files.base_fingerprint(copy) != fingerprint
