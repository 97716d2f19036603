"""Checkpoints. RUN/checkpoints/step-000012/ holds everything that step 13 needs for a bit-identical result.

    adapter_model.safetensors, adapter_config.json   the policy, in PEFT's layout
    optimizer.safetensors                            Adam's state and the states of PyTorch's random generators
    checkpoint.json                                  the step, results of this step and the one before, the history,
                                                     the other files' sizes; written last

`take` copies the contents of a checkpoint, so that `save` can write it while training continues. With several learner
processes, rank 0 writes it. Tensors are stored unsharded: a different number of processes can resume.

A directory is written under a temporary name, synced to disk and renamed. A directory whose checkpoint.json is missing
or does not match its files is never used.
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file
from safetensors.torch import save as as_safetensors
from torch import Tensor

from echo_hub.learner.history import NO_HISTORY, History
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import StepTold
from echo_shared.files.atomic import atomic_directory

log = logging.getLogger(__name__)

MARKER: Final = "checkpoint.json"
OPTIMIZER: Final = "optimizer.safetensors"
_ADAPTER: Final = "adapter:"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointState:
    """The learner's state in a checkpoint, except its tensors."""

    step: int
    told: Mapping[int, StepTold]
    """Results of this step and the previous one, by step number. A restarted learner reports both again: the hub may
    have crashed before it received these results.
    """
    history: History = NO_HISTORY


NONE: Final = CheckpointState(step=0, told={})


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint(CheckpointState):
    directory: Path


def take(policy: Policy, optimizer: torch.optim.Optimizer | None) -> dict[str, Tensor]:
    """Return the tensors for `restore`, copied to host memory; without an optimizer, only the adapter."""
    adapter = {f"{_ADAPTER}{name}": _copy(parameter) for name, parameter in policy.parameters.items()}
    return adapter if optimizer is None else {**adapter, **_optimizer_tensors(policy, optimizer)}


def adapter_in(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the adapter's weights in a result of `take` or `read`, by PEFT's names."""
    return {name.removeprefix(_ADAPTER): tensor for name, tensor in tensors.items() if name.startswith(_ADAPTER)}


def save(root: Path, policy: Policy, tensors: Mapping[str, Tensor], state: CheckpointState) -> None:
    """Write the tensors of `take` as the checkpoint of `state.step` below `root`.

    Safe during training: reads only constant attributes of `policy`.
    """
    rest = {name: tensor for name, tensor in tensors.items() if not name.startswith(_ADAPTER)}
    with atomic_directory(root / f"step-{state.step:06d}") as directory:
        policy.save_adapter(directory, adapter_in(tensors))
        (directory / OPTIMIZER).write_bytes(as_safetensors(rest))
        marker = {
            "step": state.step,
            "told": [
                {"step": step, "metrics": dict(told.metrics), "screen": dict(told.screen)}
                for step, told in state.told.items()
            ],
            **state.history.frame(),
            "files": {path.name: path.stat().st_size for path in directory.iterdir()},
        }
        (directory / MARKER).write_text(json.dumps(marker), encoding="utf-8")


def prune(root: Path, *, kept: int, milestones: int) -> None:
    """Delete all checkpoints except the newest `kept` and those whose step is a multiple of `milestones` (0: no
    multiples).
    """
    for checkpoint in complete(root)[kept:]:
        if not milestones or checkpoint.step % milestones:
            shutil.rmtree(checkpoint.directory, ignore_errors=True)


def complete(root: Path) -> list[Checkpoint]:
    """Return the complete checkpoints below `root`, newest first."""
    found = (_read(directory) for directory in root.glob("step-*"))
    return sorted((item for item in found if item is not None), key=lambda item: item.step, reverse=True)


def read(checkpoint: Checkpoint, policy: Policy) -> dict[str, Tensor]:
    """Return a checkpoint's tensors in host memory, as `take` does. Raises LearnerError if their shapes do not fit."""
    adapter = policy.read_adapter(checkpoint.directory)
    return {
        **{f"{_ADAPTER}{name}": tensor for name, tensor in adapter.items()},
        **load_file(checkpoint.directory / OPTIMIZER),
    }


def restore(tensors: dict[str, Tensor], policy: Policy, optimizer: torch.optim.Optimizer) -> None:
    tensors = dict(tensors)
    policy.set_adapter({name: tensors.pop(f"{_ADAPTER}{name}") for name in policy.parameters})
    # The checkpoint that a run starts with may lack random states, or come from another kind of device.
    of_cpu, of_cuda = tensors.pop("rng.cpu", None), tensors.pop("rng.cuda", None)
    if of_cpu is not None:
        torch.set_rng_state(of_cpu)
    if of_cuda is not None and policy.device.type == "cuda":
        torch.cuda.set_rng_state(of_cuda, policy.device)
    state: dict[int, dict[str, Tensor]] = {}
    indices = {name: index for index, name in enumerate(policy.parameters)}
    for key, tensor in tensors.items():
        name, _, field = key.rpartition("/")
        state.setdefault(indices[name], {})[field] = tensor
    # Take hyperparameters from the settings, not from the checkpoint, so that a changed learning rate applies.
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


def _optimizer_tensors(policy: Policy, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {"rng.cpu": torch.get_rng_state()}
    if policy.device.type == "cuda":
        tensors["rng.cuda"] = torch.cuda.get_rng_state(policy.device)
    for name, parameter in policy.parameters.items():
        for field, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{name}/{field}"] = _copy(value)
    return tensors


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _read(directory: Path) -> Checkpoint | None:
    try:
        marker = json.loads((directory / MARKER).read_bytes())
        for name, size in marker["files"].items():
            if (directory / name).stat().st_size != size:
                raise ValueError(f"{name} should have {size} bytes")
        return Checkpoint(
            directory=directory,
            step=marker["step"],
            told={of["step"]: StepTold(metrics=of["metrics"], screen=of["screen"]) for of in _told(marker)},
            history=History.of_frame(marker),
        )
    except (OSError, ValueError, KeyError) as error:
        log.warning("checkpoint %s is incomplete and ignored: %s", directory.name, error)
        return None


def _told(marker: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the results stored in checkpoint.json. Files of older releases have no results of screening, and hold the
    metrics of two steps in separate fields.
    """
    if "told" in marker:
        told: list[dict[str, Any]] = marker["told"]
        return told
    metrics = {**{int(step): of_step for step, of_step in marker.get("earlier", {}).items()}}
    metrics[marker["step"]] = marker["metrics"]
    return [{"step": step, "metrics": of_step, "screen": {}} for step, of_step in metrics.items()]
