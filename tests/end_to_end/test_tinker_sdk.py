"""Programs of tenants (users of the hub's API), written with the tinker SDK, use a hub without a task. Hub, learner and
programs are real processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from benchmarks.harness.live_site import LiveSite
from benchmarks.harness.tenant_site import TenantSite, found
from tests.doors import doors_python

PROGRAMS = Path(__file__).resolve().parent.parent / "echo_hub" / "tinker" / "sdk_client.py"


async def test_models_train_draw_and_are_saved(site: LiveSite) -> None:
    doors_python()
    tenants = TenantSite(site)
    await tenants.open()
    names = ("training", "sampling", "resuming", "downloading", "custom_loss", "many", "refusing")
    program = await tenants.program(await tenants.key(), PROGRAMS, *names, env={"NUM_SAMPLES": "20"})
    seen = await found(program)
    losses = seen["training"]["losses"]
    assert losses == sorted(losses, reverse=True) and len(set(losses)) == 3, "three steps on the same data"
    assert seen["sampling"]["repeats"] and seen["sampling"]["copied"]
    assert seen["sampling"]["own"] == [1, 3, None]
    assert seen["resuming"]["resumed"] and seen["resuming"]["without"]
    assert (seen["many"]["outputs"], seen["many"]["samples"]) == (2_500, 20)
    assert "RequestFailedError" in seen["refusing"]["seen"]["spoiled"]
    check_downloads(tenants, seen["downloading"])


def check_downloads(tenants: TenantSite, seen: dict[str, Any]) -> None:
    """The cookbook has downloaded trained weights and external weights. PEFT loads both, and computes the same
    log-probabilities as the hub.
    """
    assert [sorted(path.name for path in Path(folder).iterdir()) for folder in seen["folders"]] == [
        ["adapter_config.json", "adapter_model.safetensors"]
    ] * 2
    assert not any("external_weights/download" in path for path in seen["left"]), "the encrypted export is deleted"
    base = peft_logprobs(AutoModelForCausalLM.from_pretrained(tenants.base, dtype=torch.float32), seen["prompt"])
    for folder in seen["folders"]:
        plain = AutoModelForCausalLM.from_pretrained(tenants.base, dtype=torch.float32)
        with warnings.catch_warnings():
            # PEFT reads an attribute that transformers has renamed.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            adapted = PeftModel.from_pretrained(plain, folder)
        logprobs = peft_logprobs(adapted, seen["prompt"])
        assert logprobs == pytest.approx(seen["computed"], abs=1e-4)
        assert max(abs(one - other) for one, other in zip(logprobs, base, strict=True)) > 0.01


@torch.inference_mode()
def peft_logprobs(model: Any, prompt: Iterable[int]) -> list[float]:
    """Return the log-probabilities of a prompt's tokens after the first, in float32."""
    ids = torch.tensor([list(prompt)])
    every = model(input_ids=ids).logits[0].float().log_softmax(-1)
    chosen: list[float] = every[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist()
    return chosen
