from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.harness.forging import changed, in_json
from echo_hub.bundles.discrepancies import DiscrepancyKind
from echo_hub.bundles.layout import MANIFEST, sign, verified
from echo_hub.bundles.repeating import RepeatedStep, _beyond_rounding, _rounded, _share, fault_of, figure_faults
from echo_hub.bundles.report import lines_of
from echo_shared.signing.identity import Identity
from tests.echo_hub.bundles.conftest import STEPS
from tests.echo_hub.bundles.test_checking import checked, named

SAME = RepeatedStep(
    step=3,
    is_same=True,
    changed=0,
    weights=1_000,
    share=0.0,
    largest=0.0,
    beyond_rounding=0.0,
    is_same_machine=True,
    loss=0.1,
    recorded_loss=0.1,
    grad_norm=1.0,
    recorded_grad_norm=1.0,
)
ROUNDED: dict[str, Any] = {"is_same": False, "is_same_machine": False, "changed": 900, "share": 0.01, "largest": 1e-5}


@pytest.mark.parametrize(
    ("differences", "text"),
    [
        ({}, ""),
        (ROUNDED, ""),
        ({**ROUNDED, "is_same_machine": True}, "this kind of machine"),
        ({**ROUNDED, "largest": 7e-3}, "rounding cannot change one by more than 0.0064"),
        ({**ROUNDED, "share": 0.3}, "30% of the step's own change"),
        ({**ROUNDED, "changed": 1, "largest": 1e-4, "beyond_rounding": 1e-4}, "equal to the bit"),
        ({**ROUNDED, "changed": 1, "largest": 1e-4, "beyond_rounding": 0.0}, ""),
    ],
)
def test_differences_that_are_more_than_rounding(differences: dict[str, Any], text: str) -> None:
    fault = fault_of(replace(SAME, **differences), 1e-3)
    assert text in fault if text else fault == ""


@pytest.mark.parametrize(
    ("differences", "texts"),
    [
        ({}, []),
        ({"loss": 0.2}, ["loss 0.1, the repeated step has 0.2"]),
        ({"grad_norm": 1.0000001}, ["gradient norm 1.0"]),
        ({"recorded_grad_norm": None, "recorded_loss": None}, ["loss None", "gradient norm None"]),
        ({**ROUNDED, "loss": 0.2, "grad_norm": 1.1}, []),
        ({**ROUNDED, "grad_norm": 2.0}, ["gradient norm 1.0, the repeated step has 2"]),
    ],
)
def test_figures_that_differ_by_more_than_rounding(differences: dict[str, Any], texts: list[str]) -> None:
    found = list(figure_faults(replace(SAME, **differences)))
    assert len(found) == len(texts) and all(map(str.__contains__, found, texts)), found


def test_the_difference_is_a_share_of_the_steps_own_change() -> None:
    before = {"a": np.zeros((2, 2), np.float32)}
    own = {"a": np.full((2, 2), 1.0, np.float32)}
    said = {"a": np.array([[1.0, 1.0], [1.0, 1.5]], np.float32)}
    assert _share(own, said, before) == pytest.approx(0.25)
    assert _share(own, said, None) == pytest.approx(0.25)
    assert _share(before, own, before) == float("inf")


def test_the_random_weights_of_a_fresh_adapter_are_no_change() -> None:
    """A fresh adapter's A is random, and its B is 0."""
    own = {"x.lora_A.weight": np.full((4, 4), 9.0, np.float32), "x.lora_B.weight": np.ones((2, 2), np.float32)}
    said = {**own, "x.lora_B.weight": -np.ones((2, 2), np.float32)}
    assert _share(own, said, None) == pytest.approx(2.0)


def test_weights_are_rounded_as_for_nodes() -> None:
    torch = pytest.importorskip("torch")
    weights = torch.randn(1_000, generator=torch.Generator().manual_seed(1))
    assert np.array_equal(_rounded(weights.numpy()), weights.bfloat16().float().numpy())


def test_one_step_of_bfloat16_is_rounding() -> None:
    own = {"a": _rounded(np.full((1, 4), 0.01, np.float32))}
    one_step = own["a"].view(np.uint32) + np.array([[0x10000, 0, 0, 0]], np.uint32)
    assert _beyond_rounding(own, {"a": one_step.view(np.float32)}) == 0.0
    assert _beyond_rounding(own, {"a": own["a"] + np.float32(0.01)}) == pytest.approx(0.01, rel=0.02)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (f"adapters/v{STEPS:06d}/adapter_model.safetensors", "safetensors"),
        (f"checkpoints/step-{STEPS - 1:06d}/optimizer.safetensors", ""),
        (f"checkpoints/step-{STEPS - 1:06d}/checkpoint.json", "cannot resume"),
    ],
)
def test_a_hostile_checkpoint_or_adapter_is_named(
    bundle: Path, hub_key: Identity, tmp_path: Path, name: str, text: str
) -> None:
    forged = changed(bundle, tmp_path / "forged", hub_key, files={name: lambda content: b"\x80" * len(content)})
    found = checked(forged, share=0.0, repeats_step=True)
    assert found.step is not None and found.step.cannot != "" and text in found.step.cannot
    assert named(found) == []


def without_version_before(bundle: Path, out: Path, signer: Identity) -> Path:
    """Return a bundle of another machine that lacks the version before the step, and says that the step changed
    nothing."""
    before, after = (f"adapters/v{version:06d}/adapter_model.safetensors" for version in (STEPS - 1, STEPS))
    unchanged = (bundle / before).read_bytes()
    other = partial(in_json, change=lambda value: value["repeatable"].update(machine="another"))
    forged = changed(bundle, out, signer, files={after: lambda _: unchanged, "run.json": other})
    shutil.rmtree((forged / before).parent)
    said = verified((forged / MANIFEST).read_bytes())
    files = tuple(file for file in said.files if not file.path.startswith(f"adapters/v{STEPS - 1:06d}/"))
    (forged / MANIFEST).write_bytes(sign(said.model_copy(update={"files": files}), signer))
    return forged


def test_a_step_without_the_version_before_it_is_compared_with_the_checkpoint(
    bundle: Path, hub_key: Identity, tmp_path: Path
) -> None:
    found = checked(without_version_before(bundle, tmp_path / "forged", hub_key), share=0.0, repeats_step=True)
    (discrepancy,) = found.discrepancies.of(DiscrepancyKind.STEP)
    assert "100% of the step's own change" in discrepancy.text
    assert found.step is not None and not found.step.is_checkpoint_compared
    assert any(f"lacks version {STEPS - 1}" in line for line in lines_of(found))


def test_an_adapter_that_is_not_finite_is_named(bundle: Path, hub_key: Identity, tmp_path: Path) -> None:
    def change(content: bytes) -> bytes:
        return content[:-4] + np.array([np.nan], "<f4").tobytes()

    name = f"adapters/v{STEPS:06d}/adapter_model.safetensors"
    forged = changed(bundle, tmp_path / "forged", hub_key, files={name: change})
    found = checked(forged, share=0.0, repeats_step=True)
    assert named(found) == [(DiscrepancyKind.STEP, f"step {STEPS}")]
