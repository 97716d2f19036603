"""A model's files: DIRECTORY/ has everything that the next step needs for a bit-identical result.

    adapter_model.safetensors, adapter_config.json   the adapter in float32, in PEFT's layout
    optimizer.safetensors                            both moments of AdamW, and its step counts
    model.json                                       the model's LoRA settings, its number of steps, the base's
                                                     fingerprint, the other files' hashes; written last

The gradient is not saved. A directory is written under a temporary name and renamed. Files that are damaged, or that
belong to another base, are refused.
"""

from __future__ import annotations

import hashlib
import json
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load
from safetensors.torch import save as as_safetensors

from echo_hub.learner.models.adapters import ALPHA, AdapterSeat
from echo_hub.learner.models.probing import AdapterProbe
from echo_hub.learner.models.training import TrainedModel
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import LoraWish
from echo_shared.delta.adapter import WEIGHTS_FILE
from echo_shared.errors import LearnerError
from echo_shared.files.atomic import atomic_directory

MARKER: Final = "model.json"
OPTIMIZER: Final = "optimizer.safetensors"
_BLOCKS: Final = 64
"""Number of positions in each weight file at which the fingerprint reads a sample."""
_BLOCK_BYTES: Final = 4_096


def base_fingerprint(base_dir: Path) -> str:
    """Return a hash that identifies a base model. It covers the configuration and samples of all weight files; reading
    all weights would take minutes.
    """
    digest = hashlib.blake2b(digest_size=16)
    digest.update((base_dir / "config.json").read_bytes())
    for path in sorted(base_dir.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(struct.pack("<Q", size))
        with path.open("rb") as file:
            for block in range(_BLOCKS):
                file.seek(max(0, size - _BLOCK_BYTES) * block // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()


def save(model: TrainedModel, seat: AdapterSeat, directory: Path, *, base: str) -> None:
    """Write the model into `directory`, completely or not at all. `base` is the base's fingerprint."""
    moments: dict[str, torch.Tensor] = {}
    for name, weight in model.adapter.weights.items():
        for key, value in model.optimizer.state.get(weight, {}).items():
            moments[f"{name}/{key}"] = value.detach().cpu().contiguous()
    with atomic_directory(directory) as unfinished:
        seat.write(model.adapter.weights, unfinished)
        (unfinished / OPTIMIZER).write_bytes(as_safetensors(moments))
        files = {path.name: _hash(path) for path in unfinished.iterdir()}
        marker = {"lora": asdict(model.wish), "steps": model.steps, "base": base, "files": files}
        (unfinished / MARKER).write_text(json.dumps(marker, indent=1), encoding="utf-8")


def load_model(directory: Path, seat: AdapterSeat, *, base: str, optimizer: bool) -> TrainedModel:
    """Return the model in `directory`. Without `optimizer`, AdamW starts with empty moments. Raises LearnerError."""
    marker = _marker(directory)
    if marker["base"] != base:
        raise LearnerError(
            "These weights belong to another base model.",
            got=str(directory),
            do="Load them on a hub that serves the base model with which they were trained.",
        )
    wish = LoraWish(**marker["lora"])
    weights = load((directory / WEIGHTS_FILE).read_bytes())
    model = TrainedModel.of(wish, seat.of_weights(weights, scaling=ALPHA / wish.rank, trained=True))
    if optimizer:
        model.steps = int(marker["steps"])
        _restore(model, directory)
    return model


def _restore(model: TrainedModel, directory: Path) -> None:
    state: dict[int, dict[str, torch.Tensor]] = {}
    indices = {name: index for index, name in enumerate(model.adapter.weights)}
    for key, tensor in load((directory / OPTIMIZER).read_bytes()).items():
        name, _, part = key.rpartition("/")
        state.setdefault(indices[name], {})[part] = tensor
    groups = model.optimizer.state_dict()["param_groups"]
    model.optimizer.load_state_dict({"state": state, "param_groups": groups})


def export(model: TrainedModel, seat: AdapterSeat, directory: Path, *, probe: AdapterProbe) -> None:
    """Write the adapter in PEFT's layout, in the precision of published versions. Raises Refusal if no node could draw
    with it: its values, or the activations on a short prompt, are infinite or too large.
    """
    weights = seat.published(model.adapter)
    scaling = max(1.0, ALPHA / model.wish.rank)
    if not all(bool(torch.isfinite(weight.float() * scaling).all()) for weight in weights.values()):
        raise Refusal(
            RefusalKind.INVALID,
            "The model's weights are not finite.",
            do="Load earlier weights, and train on with a smaller learning_rate.",
        )
    probe.check(seat.of_weights(weights, scaling=ALPHA / model.wish.rank, trained=False))
    with atomic_directory(directory) as unfinished:
        seat.write(weights, unfinished)


def _marker(directory: Path) -> dict[str, Any]:
    try:
        marker = json.loads((directory / MARKER).read_bytes())
        for name, expected in marker["files"].items():
            if _hash(directory / name) != expected:
                raise ValueError(f"{name} has changed since it was saved")
        if not {"lora", "steps", "base"} <= marker.keys() or WEIGHTS_FILE not in marker["files"]:
            raise ValueError(f"{MARKER} is incomplete")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LearnerError(
            "Saved weights are missing or damaged.",
            got=f"{directory}: {error}",
            do="Load an earlier checkpoint.",
        ) from error
    found: dict[str, Any] = marker
    return found


def _hash(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()
