"""A run's settings: defaults < RUN/config.toml < ECHO_HUB_* environment < flags.

One frozen class a component; each component is given only its own section. In the environment, sections and keys are
joined by two underscores: ECHO_HUB_TRAINING__STEPS=50. The docstrings below are also the comments of the config.toml
that `render_config` writes, so every field has one.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from echo_shared.errors import ConfigError
from echo_shared.settings import load_settings

Port = Annotated[int, Field(ge=0, le=65535)]


class Section(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class RunConfig(Section):
    """What this run is."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = "echo"
    """Shown on the pages and to volunteers."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Every sub-seed is a hash of this one."""
    mode: Literal["colocated", "sequential", "async"] = "async"
    """colocated: the hub samples for itself. sequential: nodes sample, always from the newest version. async: nodes
    sample while the learner trains; the staleness bound is training.max_staleness."""


class ModelConfig(Section):
    """The base model."""

    base: str = "builtin:tiny"
    """`builtin:tiny`, a directory in Hugging Face layout, or an id on a model hub."""


class TaskConfig(Section):
    """Where problems and rewards come from."""

    name: Annotated[str, Field(pattern=r"^(arithmetic|reasoning-gym:[a-z0-9_]+)$")] = "arithmetic"
    """arithmetic, or reasoning-gym:DATASET with the name of any of its datasets."""
    options: dict[str, Any] = {}
    """Passed to the task as they are."""
    heldout_problems: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Problems for evaluation, disjoint from all training problems."""


class SamplingConfig(Section):
    """How nodes sample."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Of the softmax that tokens are drawn from, without top-k or top-p."""
    max_tokens: Annotated[int, Field(ge=1, le=131_072)] = 16
    """Tokens of a completion, the stop token included."""


class TrainingConfig(Section):
    """GRPO with LoRA."""

    steps: Annotated[int, Field(ge=1)] = 60
    """Optimizer steps of the whole run."""
    groups_per_step: Annotated[int, Field(ge=1, le=4096)] = 64
    """Prompts in the batch of one optimizer step."""
    group_size: Annotated[int, Field(ge=2, le=1024)] = 8
    """Completions of one prompt, compared with each other."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 2
    """Async mode: how many steps old a rollout may be when it is trained on."""
    publish_every: Annotated[int, Field(ge=1)] = 1
    """Steps between published versions."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    """Adam's, constant. For LoRA about ten times that of full fine-tuning."""
    clip_epsilon: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The importance ratio is clipped to 1 - clip_epsilon .. 1 + clip_epsilon."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients with a larger norm are scaled down to it."""
    lora_rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Of the adapter on every linear layer."""
    lora_alpha: Annotated[int, Field(ge=1)] = 32
    """The adapter is scaled by lora_alpha / lora_rank."""
    micro_batch_tokens: Annotated[int, Field(ge=64)] = 16_384
    """Tokens, prompts and padding included, of one forward and backward pass."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 1
    """Steps between checkpoints; a killed learner repeats the steps since the last one."""
    checkpoints_kept: Annotated[int, Field(ge=1)] = 3
    """Older checkpoints are removed; published versions stay."""
    adapters_kept: Annotated[int, Field(ge=1)] = 200
    """Newest published adapters that stay in RUN/adapters, for `echo-hub export` and `echo-hub eval`."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of the learner; 0 = PyTorch's own choice."""
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    """Where the learner trains: auto, cpu, cuda, cuda:1, mps."""


class LeaseConfig(Section):
    """How work is handed out."""

    deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """A lease older than this is given to another node as well; the first valid result wins."""


class ServerConfig(Section):
    """What the hub listens on, and who may join."""

    host: str = "127.0.0.1"
    """0.0.0.0 to let other machines in; put a TLS proxy in front when they come over the internet."""
    port: Port = 8710
    """The only TCP port that nodes and browsers need."""
    public_url: Annotated[str, Field(pattern=r"^(https?://[^/]+.*)?$")] = ""
    """The address that nodes use, if it is not http://host:port (a proxy's, for example)."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses of proxies in front of the hub: what they say in X-Forwarded-For is taken for the client's address."""
    swarm_port: Port = 0
    """BitTorrent port of the hub's own peer; 0 = any free one."""
    join: Literal["open", "invite"] = "open"
    """open: anyone. invite: whoever has one of the invite_tokens."""
    invite_tokens: tuple[Annotated[str, Field(min_length=8, max_length=256)], ...] = ()
    """With join = "invite": any one of these lets a node in. At least 8 characters each."""
    heartbeat_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Nodes report this often."""


class StoreConfig(Section):
    """Where rollouts and receipts are kept."""

    url: str = ""
    """An SQLAlchemy URL; empty = SQLite in the run directory."""


class HubConfig(BaseSettings):
    """All sections."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix="ECHO_HUB_", env_nested_delimiter="__")

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    sampling: SamplingConfig = SamplingConfig()
    training: TrainingConfig = TrainingConfig()
    leases: LeaseConfig = LeaseConfig()
    server: ServerConfig = ServerConfig()
    store: StoreConfig = StoreConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> HubConfig:
        if self.run.mode == "sequential" and self.training.publish_every != 1:
            raise ValueError('training.publish_every must be 1 when run.mode = "sequential": every step samples anew')
        if self.run.mode == "async" and self.training.publish_every > self.training.max_staleness + 1:
            raise ValueError(
                "training.publish_every must be at most training.max_staleness + 1, or nothing is fresh enough"
            )
        if self.server.join == "invite" and not self.server.invite_tokens:
            raise ValueError('server.invite_tokens must hold a token when server.join = "invite"')
        return self


def load_config(path: Path | None, overrides: Mapping[str, Any]) -> HubConfig:
    """The settings that hold. `path` None = no file; `overrides` are flags, nested by section, None = not given.

    Raises ConfigError, which names the setting, its value and the line, variable or flag that set it.
    """
    return load_settings(HubConfig, path, overrides)


def render_config(config: HubConfig) -> str:
    """`config` as commented TOML with every setting in it; `load_config` gives the same settings back.

    Raises ConfigError for a value in task.options that TOML cannot express.
    """
    header = (
        "Every setting of this run. A line that is removed falls back to the default. Environment variables "
        "(ECHO_HUB_TRAINING__STEPS=50 sets training.steps) and flags win over this file."
    )
    parts = [_comment(header)]
    for section_name in HubConfig.model_fields:
        section: Section = getattr(config, section_name)
        schema = type(section).model_json_schema()
        parts.append(f"\n{_comment(schema['description'])}[{section_name}]\n")
        for name, about in schema["properties"].items():
            value = _toml(getattr(section, name), where=f"{section_name}.{name}")
            parts.append(f"{_comment(about['description'] + _limits(about))}{name} = {value}\n")
    return "".join(parts)


def _comment(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), width=110, initial_indent="# ", subsequent_indent="# ") + "\n"


def _limits(schema: Mapping[str, Any]) -> str:
    """What a JSON schema allows, in words, to go behind a description."""
    words = [
        f"{word} {schema[key]}"
        for key, word in {
            "minimum": "at least",
            "exclusiveMinimum": "more than",
            "maximum": "at most",
            "exclusiveMaximum": "less than",
        }.items()
        if key in schema
    ]
    return f" ({', '.join(words)})" if words else ""


def _toml(value: Any, *, where: str) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item, where=where) for item in value) + "]"
    if isinstance(value, Mapping):
        pairs = (f"{_toml(str(key), where=where)} = {_toml(item, where=where)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    raise ConfigError(
        "A setting cannot be written to a settings file.",
        got=f"{where} holds {value!r}",
        do="Use text, numbers, true, false, lists and tables.",
    )
