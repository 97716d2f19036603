"""A verifier whose device has memory for the base only in 16 bits; it must compute in float32 all the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from echo_hub.learner.policy import Policy
from echo_hub.verify import worker
from echo_hub.verify.drawn import unpack_evidence, unpack_spans
from echo_hub.verify.worker import Examiner, stored_dtype
from echo_shared.errors import LearnerError
from tests.echo_hub.verify.conftest import Versions

PROMPTS = [np.array([number + 2, 7, 9], np.int32) for number in range(30)]
HALVES = [torch.bfloat16, torch.float16]


def in_files_of(versions: Versions, directory: Path, dtype: torch.dtype, *, but: str = "") -> Versions:
    """Return the same versions with base files of type `dtype`; the tensor named `but` stays in float32."""
    base_dir = copytree(versions.settings.base_dir, directory / "base")
    weights = load_file(base_dir / "model.safetensors")
    kept = {name: weight if name == but else weight.to(dtype) for name, weight in weights.items()}
    save_file(kept, base_dir / "model.safetensors", metadata={"format": "pt"})
    settings = versions.settings.model_copy(update={"base_dir": base_dir})
    return replace(versions, settings=settings, policy=Policy.load(settings, dtype=torch.float32))


def opened(versions: Versions, *, fits: bool, monkeypatch: pytest.MonkeyPatch) -> Examiner:
    """Open an examiner on a device that has (`fits`) or lacks the memory for the base in float32."""
    monkeypatch.setattr(worker, "is_float32_affordable", lambda settings: fits)
    return Examiner.open({"settings": versions.settings.model_dump(mode="json"), "kept": 3})


@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_storage_gives_the_findings_of_float32(
    versions: Versions, tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Honest rollouts of several versions must pass, and forged ones must give the same evidence as with float32, up to
    rounding.
    """
    own = in_files_of(versions, tmp_path, dtype)
    honest = [one for version in (0, 1, 3) for one in own.drawn(version, 10 * version, 10 * version + 1)]
    forged = [
        replace(one, rollout_id=f"forged {one.rollout_id}", completion_ids=one.completion_ids[::-1].copy())
        for one in honest
    ]
    found = []
    for fits in (True, False):
        examiner = opened(own, fits=fits, monkeypatch=monkeypatch)
        assert examiner._policy.head.weight.dtype is (torch.float32 if fits else dtype)
        frames = examiner.examine([*honest, *forged], own.adapters)
        found.append({frame["rollout_id"]: unpack_spans(frame["spans"])[0][1] for frame in frames})
    exact, held = found
    for one in honest:
        shown = held[one.rollout_id]
        assert shown.draws[0] == shown.claims[0] == shown.num_tokens > 0
    for one in forged:
        np.testing.assert_allclose(
            held[one.rollout_id].draws_CS, exact[one.rollout_id].draws_CS, rtol=1e-3, atol=1e-2, err_msg=str(dtype)
        )
    assert sum(sum(exact[one.rollout_id].draws[1:]) for one in forged) > 0


@pytest.mark.parametrize("dtype", HALVES)
def test_16_bit_storage_gives_the_measurements_of_float32(
    versions: Versions, tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = in_files_of(versions, tmp_path, dtype)
    for rounding in ("f32", "bf16", "q8_0"):
        scales = []
        for fits in (True, False):
            examiner = opened(own, fits=fits, monkeypatch=monkeypatch)
            shown = unpack_evidence(examiner.measure(rounding, 1, own.adapters, PROMPTS)["evidence"])
            scales.append((shown.draws_CS[0].argmax(), shown.claims_CS[0].argmax()))
        assert np.abs(np.subtract(*scales)).max() <= 1, "completions are sampled in 16 bits, so they differ"


def test_bfloat16_that_is_asked_for_computes_in_bfloat16(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = in_files_of(versions, tmp_path, torch.bfloat16)
    learner = own.settings.learner.model_copy(update={"precision": "bfloat16"})
    coarse = replace(own, settings=own.settings.model_copy(update={"learner": learner}))
    rollouts = own.drawn(1, *range(8))
    frames = opened(coarse, fits=True, monkeypatch=monkeypatch).examine(rollouts, own.adapters)
    off = [sum(unpack_spans(frame["spans"])[0][1].claims[1:]) for frame in frames]
    assert sum(off) > 0, "its own rounding is visible"


@pytest.mark.parametrize("dtype", HALVES)
def test_files_of_one_16_bit_type_are_held_in_it(versions: Versions, tmp_path: Path, dtype: torch.dtype) -> None:
    assert stored_dtype(in_files_of(versions, tmp_path, dtype).settings.base_dir) is dtype


def test_any_other_files_are_held_in_float32(versions: Versions, tmp_path: Path) -> None:
    """One kind of 16 bits cannot represent the other kind or float32 exactly, so such files are held in float32."""
    assert stored_dtype(versions.settings.base_dir) is torch.float32
    mixed = in_files_of(versions, tmp_path, torch.bfloat16, but="model.norm.weight")
    assert stored_dtype(mixed.settings.base_dir) is torch.float32
    (tmp_path / "two").mkdir()
    for number, dtype in enumerate(HALVES):
        save_file({"a": torch.ones(2, dtype=dtype)}, tmp_path / "two" / f"model-{number}.safetensors")
    assert stored_dtype(tmp_path / "two") is torch.float32


def test_too_little_memory_is_reported(versions: Versions, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> Policy:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(Policy, "load", full)
    with pytest.raises(LearnerError, match=r"(?s)not enough memory for the base model.*verifier_device"):
        opened(versions, fits=True, monkeypatch=monkeypatch)
