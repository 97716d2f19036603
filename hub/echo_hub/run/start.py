"""What a run starts with that does not start from the bare base: RUN/start, which is whole or not there.

    RUN/start/start.json      where it is from
    RUN/start/adapter/        the version as nodes get it, in PEFT's layout
    RUN/start/checkpoint/     the same for the learner, in float32 and in a checkpoint's layout; with the optimizer's
                              state, where the run goes on with one

Version 0 stays the base, here as in every run. What the run starts with is its first version above it: 1 where it is an
adapter from anywhere, K where the run is a fork of another at its version K. Steps go on from there.

An adapter comes from a stranger, perhaps: it is read as `echo_shared.adapter` reads what comes over the network, from
safetensors alone, and has to fit the base and the run's LoRA settings.
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
from echo_shared.adapter import CONFIG_FILE, PROJECTIONS, WEIGHTS_FILE, Adapter, load_adapter, lora_scaling, plain_name
from echo_shared.errors import CodecError, ConfigError, StorageError
from echo_shared.files import atomic_directory, disk_errors
from echo_shared.tensors import TensorFile

RECORD: Final = "start.json"
ADAPTER: Final = "adapter"
CHECKPOINT: Final = "checkpoint"
FINETUNED: Final = "sft.json"
"""Beside the adapter that `echo-hub sft` has trained: where it is from, and its figures."""

Weights = Mapping[str, NDArray[np.float32]]
"""A [R, I] and B [O, R] by PEFT's names."""

_LAYER: Final = re.compile(r"(?:model\.)?(layers\.\d+\.(?:[A-Za-z0-9_]+\.)*([a-z]+_proj))\.weight")


class Ancestor(BaseModel):
    """A run whose version another began with."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    run_name: str
    run_id: str = ""
    """Empty: its books could not be read."""
    policy_version: int

    def __str__(self) -> str:
        return f"version {self.policy_version} of {self.run_name}" + (f" ({self.run_id})" if self.run_id else "")


class Origin(BaseModel):
    """Where an adapter is from that was trained for this run: `origin` in the FINETUNED of its directory."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    source: str = ""
    """What was trained, as in `Start.source`."""
    ancestors: tuple[Ancestor, ...] = ()
    """The runs that this is from, the nearest first."""
    demonstrations: str = ""
    """The file that it was trained on."""


class Start(BaseModel):
    """start.json."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    kind: Literal["adapter", "fork"]
    policy_version: Annotated[int, Field(ge=1)]
    """What it is in this run."""
    source: str
    """What it was called where it was taken from, or what was trained on demonstrations: no path; empty: the base."""
    sha256: str
    """Of the weights as nodes get them."""
    has_optimizer: bool = False
    """The optimizer goes on where it was."""
    first_group: Annotated[int, Field(ge=0)] = 0
    """The first problem that the run samples: those before it, the run that it forked from has trained on."""
    ancestors: tuple[Ancestor, ...] = ()
    """The run that it is from, the run that this one was from, and so on."""
    demonstrations: str = ""
    """The file that it was trained on afterwards, by `echo-hub sft`; empty: it was not."""

    @property
    def lineage(self) -> tuple[str, ...]:
        """Where it comes from, in words, the nearest first."""
        alone = f"the adapter {self.source}" if self.source else "the base"
        nearest, *others = map(str, self.ancestors or (alone,))
        return (f"{nearest}, fine-tuned on {self.demonstrations}" if self.demonstrations else nearest, *others)

    @property
    def steps_before(self) -> int:
        """How many steps the learning rate's schedule leaves out: a fork goes on with the schedule of its run."""
        return self.policy_version if self.kind == "adapter" else 0


def read_start(directory: RunDirectory) -> Start | None:
    """What the run starts with; None: the bare base. Raises StorageError when it cannot be read."""
    path = directory.start / RECORD
    try:
        return Start.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise StorageError(
            "It cannot be read what this run starts with.", got=f"{path}: {error}", do="Restore it from a backup."
        ) from error


def read_origin(adapter_dir: Path) -> Origin | None:
    """Where an adapter of `echo-hub sft` is from; None: it is no such. Raises ConfigError when it cannot be read."""
    path = adapter_dir / FINETUNED
    try:
        return Origin.model_validate(json.loads(path.read_bytes())["origin"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(
            "It cannot be read where an adapter is from.", got=f"{path}: {error!r}", do="Delete that file."
        ) from error


def read_weights(adapter_dir: Path, config: HubConfig, base_dir: Path) -> Weights:
    """The adapter's weights as a run of these settings has them. Raises ConfigError unless they fit it.

    The scaling of an adapter that was trained with another lora_alpha or rslora is taken into its B, so that it
    computes what it did.
    """
    if not (adapter_dir / WEIGHTS_FILE).is_file() and any(adapter_dir.glob("adapter_model.*")):
        raise ConfigError(
            "An adapter's weights are only read from safetensors.",
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
    """The files of PEFT's layout, by name; `rounded` to bfloat16, to nearest, ties to even."""
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
    """`adapter_files` as nodes get them."""
    precision = config.dissemination.precision
    rounded = precision == "bfloat16" or (precision == "auto" and is_bfloat16(weights))
    return adapter_files(weights, config, rounded=rounded)


def write_start(directory: RunDirectory, config: HubConfig, weights: Weights, start: Start) -> Start:
    """Makes RUN/start of an adapter, whose optimizer begins anew; `start` with the hash. Raises StorageError."""
    files = published_files(weights, config)
    start = start.model_copy(update={"sha256": hash_of(files), "has_optimizer": False})
    with disk_errors("The run's start cannot be written.", directory.root), atomic_directory(directory.start) as folder:
        write_files(folder / ADAPTER, files)
        write_checkpoint(folder / CHECKPOINT, adapter_files(weights, config), step=start.policy_version)
        (folder / RECORD).write_text(start.model_dump_json(indent=2) + "\n", encoding="utf-8")
    return start


def write_checkpoint(folder: Path, files: Mapping[str, bytes], *, step: int) -> None:
    """A checkpoint of an adapter alone, as `echo_hub.learner.checkpoint` reads it: the optimizer begins anew."""
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
    """Whether rounding to bfloat16 changes nothing."""
    return not any(
        (np.ascontiguousarray(weight).view(np.uint32) & np.uint32(0xFFFF)).any() for weight in weights.values()
    )


def hash_of(files: Mapping[str, bytes]) -> str:
    """SHA-256 of an adapter's weights, in its files by name."""
    return hashlib.sha256(files[WEIGHTS_FILE]).hexdigest()


def _check_fits(adapter: Adapter, adapter_dir: Path, config: HubConfig, base_dir: Path) -> None:
    rank = config.training.lora_rank
    ranks = sorted({len(module.a) for module in adapter.modules})
    if ranks != [rank]:
        raise ConfigError(
            "An adapter has another rank than the run.",
            got=f"rank {', '.join(map(str, ranks))} in {adapter_dir}, training.lora_rank = {rank}",
            do=f"Set training.lora_rank to {ranks[0]}." if len(ranks) == 1 else "Use an adapter of one rank.",
        )
    layers = config.training.lora_projections
    adapted = {module.path.rpartition(".")[2] for module in adapter.modules}
    if more := sorted(adapted - layers):
        raise ConfigError(
            "An adapter adapts layers that the run does not train.",
            got=f"{', '.join(more)} in {adapter_dir}, training.lora_targets = {config.training.lora_targets}",
            do=f"Set training.lora_targets to {','.join(sorted(adapted))}, or use another adapter.",
        )
    base = {path: shape for path, shape in _base_shapes(base_dir).items() if path.rpartition(".")[2] in layers}
    of_adapter = {module.path.removeprefix("model."): (len(module.b), module.a.shape[1]) for module in adapter.modules}
    wrong = [path for path, shape in of_adapter.items() if path in base and base[path] != shape]
    strange = [path for path in of_adapter if base and path.startswith("layers.") and path not in base]
    if wrong or strange:
        path = (wrong or strange)[0]
        raise ConfigError(
            "An adapter does not fit the base model.",
            got=f"{path}: {of_adapter[path]} in {adapter_dir}, {base.get(path, 'no such layer')} in the base",
            do="Set model.base to the model that it was trained on.",
        )
    if missing := sorted(base.keys() - of_adapter.keys()):
        names = sorted({path.rpartition(".")[2] for path in missing})
        raise ConfigError(
            "An adapter does not adapt all layers that the run trains.",
            got=f"{adapter_dir} lacks {', '.join(names)} ({len(missing)} layers, such as {missing[0]})",
            do=f"Set training.lora_targets to {','.join(sorted(adapted))}, or use an adapter of all of them.",
        )


def _base_shapes(base_dir: Path) -> dict[str, tuple[int, ...]]:
    """[O, I] of the layers that are adapted, by their paths below `model`; empty where the files have other names."""
    found: dict[str, tuple[int, ...]] = {}
    for path in sorted(base_dir.glob("*.safetensors")):
        try:
            with safe_open(path, framework="numpy") as file:
                for name in file.keys():  # noqa: SIM118 - it is no mapping
                    match = _LAYER.fullmatch(name)
                    if match is not None and match[2] in PROJECTIONS and ".experts." not in name:
                        found[match[1]] = tuple(file.get_slice(name).get_shape())
        except (OSError, SafetensorError) as error:
            raise ConfigError("The base model cannot be read.", got=f"{path}: {error}") from error
    return found


def _config_of(adapter_dir: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((adapter_dir / CONFIG_FILE).read_bytes())
    return config


def _scaling_of(adapter_dir: Path) -> float | None:
    """Its one scaling; None: layers have several."""
    config = _config_of(adapter_dir)
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        return None
    return lora_scaling(config["r"], config["lora_alpha"], rslora=bool(config.get("use_rslora")))


def _unscaled(adapter_dir: Path) -> Weights:
    """As they lie in the file: dividing by the scaling what was multiplied by it may be off by a rounding."""
    return {plain_name(name): np.array(tensor) for name, tensor in TensorFile(adapter_dir / WEIGHTS_FILE).items()}


def _as_bfloat16(arrays: Mapping[str, NDArray[np.float32]]) -> bytes:
    """A safetensors file, written by hand: numpy has no bfloat16. Format: an 8-byte length, JSON, the tensors."""
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
