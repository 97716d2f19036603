"""An adapter with finite weights whose outputs are too large for 16 bits must not be published."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.harness.plain_losses import ModelsBench
from echo_hub.learner.models import files
from echo_hub.learner.models.training import TrainedModel
from echo_hub.tenants.refusal import Refusal


def grown(bench: ModelsBench, factor: float) -> TrainedModel:
    model = bench.model(b_scale=0.3)
    with torch.no_grad():
        for name, weight in model.adapter.weights.items():
            if ".lora_B." in name:
                weight.mul_(factor)
    return model


@pytest.mark.parametrize(("factor", "got"), [(10.0, "e+05"), (1e10, "e+2"), (1e37, "inf")])
def test_an_adapter_that_nodes_could_not_use_is_not_published(
    bench: ModelsBench, tmp_path: Path, factor: float, got: str
) -> None:
    model = grown(bench, factor)
    assert all(bool(torch.isfinite(weight).all()) for weight in model.adapter.weights.values())
    with pytest.raises(Refusal, match="too large for 16 bits") as refused:
        files.export(model, bench.seat, tmp_path / "v", probe=bench.probe)
    assert refused.value.got is not None and got in refused.value.got
    assert not (tmp_path / "v").exists()


def test_a_large_adapter_that_nodes_can_use_is_published(bench: ModelsBench, tmp_path: Path) -> None:
    files.export(grown(bench, 1.0), bench.seat, tmp_path / "v", probe=bench.probe)
    assert (tmp_path / "v").is_dir()
