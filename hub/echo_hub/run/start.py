"""The initial adapter of a run that does not start from the bare base: RUN/start. This directory is complete or
missing.

    RUN/start/start.json      its origin
    RUN/start/adapter/        the version as nodes get it, in PEFT layout
    RUN/start/checkpoint/     the version for the learner, in float32 and checkpoint layout; with optimizer state if the
                              run resumes one

Version 0 is the base model in every run. The initial adapter is the next version: 1 for an adapter from elsewhere, K
for a fork of another run at its version K. Steps are counted from there.

The adapter may come from a stranger. So it is read like network input (`echo_shared.delta.adapter`), only from
safetensors, and it must fit the base model and the run's LoRA settings.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from echo_hub.config.sections import HubConfig
from echo_hub.run.directory import RunDirectory
from echo_shared.delta.adapter import (
    CONFIG_FILE,
    WEIGHTS_FILE,
    Adapter,
    is_adaptable,
    is_of_experts,
    load_adapter,
    lora_scaling,
    plain_name,
)
from echo_shared.delta.tensors import TensorFile
from echo_shared.errors import CodecError, ConfigError, StorageError
from echo_shared.files.atomic import atomic_directory, disk_errors

RECORD: Final = "start.json"
ADAPTER: Final = "adapter"
CHECKPOINT: Final = "checkpoint"
FINETUNED: Final = "sft.json"
"""File next to an adapter trained by `echo-hub sft`: its origin and figures."""

Weights = Mapping[str, NDArray[np.float32]]
"""Adapter weights by their names in PEFT's files. A has the shape [R, I], B has [O, R] (R: rank, I: inputs, O: outputs
of a layer)."""

_LAYER: Final = re.compile(r"(?:model\.)?(layers\.\d+\.(?:[A-Za-z0-9_]+\.)*[A-Za-z0-9_]+)\.weight")


class Ancestor(BaseModel):
    """A run from which another run took its first version."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run_name: str
    run_id: str = ""
    """Id of the run; "" if its database could not be read."""
    policy_version: int

    def __str__(self) -> str:
        return f"version {self.policy_version} of {self.run_name}" + (f" ({self.run_id})" if self.run_id else "")


class AdapterOrigin(BaseModel):
    """Origin of an adapter trained for this run: `origin` in its FINETUNED file."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    source: str = ""
    """The adapter or model trained on the demonstrations, in the form of `Start.source`."""
    ancestors: tuple[Ancestor, ...] = ()
    """The runs from which the adapter descends, the nearest first."""
    demonstrations: str = ""
    """Name of the file of demonstrations on which the adapter was trained."""


class Start(BaseModel):
    """The content of RUN/start/start.json: the origin of a run's first version."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["adapter", "fork"]
    policy_version: Annotated[int, Field(ge=1)]
    """Version number of the initial adapter in this run."""
    source: str
    """Name of the adapter without its path; or, after fine-tuning, name of the model that was fine-tuned. "" for the
    base model."""
    sha256: str
    """SHA-256 of the weights file that nodes get."""
    has_optimizer: bool = False
    """True if the run continues with the optimizer state of the run that it was forked from."""
    first_group: Annotated[int, Field(ge=0)] = 0
    """Id of the first group to sample. A fork skips the groups on which its parent run has trained."""
    ancestors: tuple[Ancestor, ...] = ()
    """Parent run, the parent's parent, and so on."""
    demonstrations: str = ""
    """Name of the file of demonstrations with which `echo-hub sft` fine-tuned the initial adapter; "" without
    fine-tuning.
    """

    @property
    def lineage(self) -> tuple[str, ...]:
        """Origins of the run's first version in words, the nearest first."""
        alone = f"the adapter {self.source}" if self.source else "the base"
        nearest, *others = map(str, self.ancestors or (alone,))
        return (f"{nearest}, fine-tuned on {self.demonstrations}" if self.demonstrations else nearest, *others)

    @property
    def steps_before(self) -> int:
        """Number of earlier steps that count in the version number but not in the learning-rate schedule. For a fork
        this is 0, because a fork continues its parent's schedule."""
        return self.policy_version if self.kind == "adapter" else 0


def read_start(directory: RunDirectory) -> Start | None:
    """Return the record of the adapter with which the run starts. Return None for the bare base model. Raises
    StorageError if the record cannot be read."""
    path = directory.start / RECORD
    try:
        return Start.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise StorageError(
            "The run's start record cannot be read.", got=f"{path}: {error}", do="Restore it from a backup."
        ) from error


def read_origin(adapter_dir: Path) -> AdapterOrigin | None:
    """Return the origin of an adapter that `echo-hub sft` made; None for other adapters. Raises ConfigError if the
    origin cannot be read.
    """
    path = adapter_dir / FINETUNED
    try:
        return AdapterOrigin.model_validate(json.loads(path.read_bytes())["origin"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            "The origin of an adapter cannot be read.", got=f"{path}: {error!r}", do="Delete that file."
        ) from error


def read_weights(adapter_dir: Path, config: HubConfig, base_dir: Path) -> Weights:
    """Return an adapter's weights, converted for a run with these settings. Raises ConfigError unless they fit the run.

    If the adapter was trained with another lora_alpha or rslora, B is rescaled, so that the adapter computes the same
    function.
    """
    if not (adapter_dir / WEIGHTS_FILE).is_file() and any(adapter_dir.glob("adapter_model.*")):
        raise ConfigError(
            "Adapter weights can be read only from safetensors.",
            got=f"no {WEIGHTS_FILE} in {adapter_dir}",
            do="Save it with PEFT's save_pretrained(..., safe_serialization=True): pickled weights are never loaded.",
        )
    try:
        adapter = load_adapter(adapter_dir)
    except CodecError as error:
        raise ConfigError(error.what, got=f"{adapter_dir}: {error.got}", do=error.do) from error
    _check_fits(adapter, adapter_dir, config, base_dir)
    scaling = np.float32(config.training.lora_scaling)
    plain = _scaling_of(adapter_dir) == config.training.lora_scaling
    unscaled = _unscaled(adapter_dir) if plain else {}
    weights: dict[str, NDArray[np.float32]] = {}
    for module in adapter.modules:
        name = f"base_model.model.{module.path}"
        weights[f"{name}.lora_A.weight"] = module.a
        b = unscaled.get(f"{name}.lora_B.weight")
        weights[f"{name}.lora_B.weight"] = module.b / scaling if b is None else b
    return weights


def adapter_files(weights: Weights, config: HubConfig, *, rounded: bool = False) -> dict[str, bytes]:
    """Return the files of PEFT's layout, by name. If `rounded`, weights are rounded to bfloat16: to nearest, ties to
    even.
    """
    base = config.model.base
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": Path(base).name if Path(base).exists() else base,
        "r": config.training.lora_rank,
        "lora_alpha": config.training.lora_alpha,
        "use_rslora": config.training.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
        "target_modules": sorted({name.rsplit(".", 3)[1] for name in weights}),
    }
    arrays = {name: np.ascontiguousarray(weight, dtype=np.float32) for name, weight in weights.items()}
    return {
        WEIGHTS_FILE: _as_bfloat16(arrays) if rounded else save(arrays, metadata={"format": "pt"}),
        CONFIG_FILE: (json.dumps(about, indent=2, sort_keys=True) + "\n").encode(),
    }


def published_files(weights: Weights, config: HubConfig) -> dict[str, bytes]:
    """Return the adapter's files in PEFT's layout, in the precision in which nodes get them."""
    precision = config.dissemination.precision
    rounded = precision == "bfloat16" or (precision == "auto" and is_bfloat16(weights))
    return adapter_files(weights, config, rounded=rounded)


def write_start(directory: RunDirectory, config: HubConfig, weights: Weights, start: Start) -> Start:
    """Write RUN/start for an adapter without optimizer state. Return `start` with the SHA-256 of the weights. Raises
    StorageError.
    """
    files = published_files(weights, config)
    start = start.model_copy(update={"sha256": hash_of(files), "has_optimizer": False})
    with disk_errors("The run's start cannot be written.", directory.root), atomic_directory(directory.start) as folder:
        write_files(folder / ADAPTER, files)
        write_checkpoint(folder / CHECKPOINT, adapter_files(weights, config), step=start.policy_version)
        (folder / RECORD).write_text(start.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return start


def write_checkpoint(folder: Path, files: Mapping[str, bytes], *, step: int) -> None:
    """Write a checkpoint (`echo_hub.learner.checkpoint`) that holds only an adapter. Without its state, the optimizer
    starts fresh."""
    folder.mkdir()
    contents = {**files, "optimizer.safetensors": save({})}
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    sizes = {name: len(content) for name, content in contents.items()}
    marker = {"step": step, "told": [], "norms": [], "files": sizes}
    (folder / "checkpoint.json").write_text(json.dumps(marker), encoding="utf-8")


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def is_bfloat16(weights: Weights) -> bool:
    """Return True if rounding to bfloat16 changes nothing."""
    return not any(
        (np.ascontiguousarray(weight).view(np.uint32) & np.uint32(0xFFFF)).any() for weight in weights.values()
    )


def hash_of(files: Mapping[str, bytes]) -> str:
    return hashlib.sha256(files[WEIGHTS_FILE]).hexdigest()


def _check_fits(adapter: Adapter, adapter_dir: Path, config: HubConfig, base_dir: Path) -> None:
    rank = config.training.lora_rank
    ranks = sorted({len(module.a) for module in adapter.modules})
    if ranks != [rank]:
        raise ConfigError(
            "The adapter's rank differs from the run's.",
            got=f"rank {', '.join(map(str, ranks))} in {adapter_dir}, training.lora_rank = {rank}",
            do=f"Set training.lora_rank to {ranks[0]}." if len(ranks) == 1 else "Use an adapter of one rank.",
        )
    layers = config.training.lora_projections
    adapted = {module.path.rpartition(".")[2] for module in adapter.modules}
    if more := sorted(adapted - layers):
        raise ConfigError(
            "The adapter changes layers that the run does not train.",
            got=f"{', '.join(more)} in {adapter_dir}, training.lora_targets = {config.training.lora_targets}",
            do=f"Set training.lora_targets to {','.join(sorted(adapted))}, or use another adapter.",
        )
    shapes, of_experts = _base_layers(base_dir)
    base = {path: shape for path, shape in shapes.items() if _name(path) in layers}
    of_adapter = {module.path.removeprefix("model."): (len(module.b), module.a.shape[1]) for module in adapter.modules}
    wrong = [path for path, shape in of_adapter.items() if path in base and base[path] != shape]
    strange = [path for path in of_adapter if base and path.startswith("layers.") and path not in base]
    if wrong or strange:
        path = (wrong or strange)[0]
        raise ConfigError(
            "The adapter does not fit the base model.",
            got=f"{path}: {of_adapter[path]} in {adapter_dir}, {base.get(path, 'no such layer')} in the base",
            do="Set model.base to the model that it was trained on.",
        )
    if missing := sorted(path for path in base.keys() - of_adapter.keys() if _name(path) not in of_experts):
        names = sorted(set(map(_name, missing)))
        raise ConfigError(
            "The adapter lacks layers that the run trains.",
            got=f"{adapter_dir} lacks {', '.join(names)} ({len(missing)} layers, such as {missing[0]})",
            do=f"Set training.lora_targets to {','.join(sorted(adapted))}, or use an adapter with all of them.",
        )


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _base_layers(base_dir: Path) -> tuple[dict[str, tuple[int, ...]], set[str]]:
    """Return the shape [O, I] of each layer that can have an adapter, by the layer's path below `model`, and the names
    of the layers of experts. Both are empty if the files use other names.

    A layer outside experts may have the same name as a layer of experts. Such a layer need not have an adapter, because
    PEFT cannot adapt it in some model families.
    """
    found: dict[str, tuple[int, ...]] = {}
    of_experts: set[str] = set()
    for path in sorted(base_dir.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118  # This is not a mapping.
                    match = _LAYER.fullmatch(name)
                    if match is None:
                        continue
                    if is_adaptable(match[1]):
                        found[match[1]] = tuple(file.get_slice(name).get_shape())
                    elif is_of_experts(match[1]):
                        of_experts.add(_name(match[1]))
        except (OSError, SafetensorError) as error:
            raise ConfigError("The base model cannot be read.", got=f"{path}: {error}") from error
    return found, of_experts


def _config_of(adapter_dir: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((adapter_dir / CONFIG_FILE).read_bytes())
    return config


def _scaling_of(adapter_dir: Path) -> float | None:
    config = _config_of(adapter_dir)
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        return None
    return lora_scaling(config["r"], config["lora_alpha"], rslora=bool(config.get("use_rslora")))


def _unscaled(adapter_dir: Path) -> Weights:
    """Return the adapter's weights as they are stored, without its scaling factor: to apply and remove the factor could
    add rounding errors."""
    return {plain_name(name): np.array(tensor) for name, tensor in TensorFile(adapter_dir / WEIGHTS_FILE).items()}


def _as_bfloat16(arrays: Mapping[str, NDArray[np.float32]]) -> bytes:
    """Build a safetensors file in bfloat16, a type that numpy lacks. The file consists of an 8-byte length, a JSON
    header and the data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = b""
    for name in sorted(arrays):
        bits = arrays[name].view(np.uint32)
        data = ((bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)).astype("<u2")
        content = data.tobytes()
        shape = list(arrays[name].shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [len(body), len(body) + len(content)]}
        body += content
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    return len(encoded).to_bytes(8, "little") + encoded + body
