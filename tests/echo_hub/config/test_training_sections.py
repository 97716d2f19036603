from __future__ import annotations

import pytest

from echo_hub.config.training_sections import TrainingConfig
from echo_shared.delta.adapter import ATTENTION, FEED_FORWARD


@pytest.mark.parametrize(
    ("targets", "kept", "layers"),
    [
        ("all", "all", ATTENTION | FEED_FORWARD),
        ("attention", "attention", ATTENTION),
        ("mlp", "mlp", FEED_FORWARD),
        ("v_proj, q_proj", "q_proj,v_proj", {"q_proj", "v_proj"}),
        ("kv_b_proj", "kv_b_proj", {"kv_b_proj"}),
    ],
)
def test_the_same_layers_are_written_in_one_way(targets: str, kept: str, layers: set[str]) -> None:
    training = TrainingConfig(lora_targets=targets)
    assert (training.lora_targets, training.lora_projections) == (kept, layers)
    assert training.names_layers is (kept not in ("all", "attention", "mlp"))


@pytest.mark.parametrize("targets", ["", "q_proj,", "lm_head", "all,q_proj", "attention, mlp"])
def test_other_layers_are_refused(targets: str) -> None:
    with pytest.raises(ValueError, match="cannot have an adapter: use all, attention, mlp, or some of"):
        TrainingConfig(lora_targets=targets)


def test_the_scaling() -> None:
    assert TrainingConfig(lora_rank=16, lora_alpha=32).lora_scaling == 2
    assert TrainingConfig(lora_rank=16, lora_alpha=32, rslora=True).lora_scaling == 8
