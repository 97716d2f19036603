"""A node's settings: defaults < config.toml < ECHO_NODE_* environment < flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from echo_node.core.manners import MannersConfig
from echo_node.core.updating import UpdateMode
from echo_node.host.cage.description import CageMode
from echo_node.host.paths import HOME_VARIABLE
from echo_node.lending.pairing import HelperAddress
from echo_shared.errors import ConfigError
from echo_shared.messages import MAX_COST_PER_HOUR, MAX_POWER_WATTS
from echo_shared.messages.shown_names import checked_name
from echo_shared.settings import SECRET, SecretText, load_settings

BackendName = Literal["auto", "llama_cpp", "mlx", "torch", "vllm"]

PrecisionName = Literal["auto", "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "q3_k_m"]


class NodeConfig(BaseSettings):
    """All settings; config.toml holds them at its top level, but for the table [manners]."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # `echo-node config list` shows them.
        env_prefix="ECHO_NODE_",
        env_nested_delimiter="__",
    )

    name: Annotated[str, Field(max_length=64), AfterValidator(lambda name: name and checked_name(name))] = ""
    """Shown on the hub's pages, and unlike other nodes' names; empty = one made from the node's id."""
    invite_token: Annotated[SecretText, Field(max_length=256)] = ""
    """Asked for by hubs that admit invited nodes only; kept for later runs once a hub has accepted it."""
    backend: BackendName = "auto"
    """The sampling engine; auto = the best that this machine can run."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads of the engine; 0 = the engine's own choice."""
    helpers: Annotated[tuple[str, ...], Field(repr=False), SECRET] = ()
    """HOST:PORT#CODE of other machines that hold a part of the model each, as `echo-node lend` prints it there."""
    precision: PrecisionName = "auto"
    """Of the engine's weights; auto = exact for small models, else 16 bits, or 8 where these take too much memory."""
    kv_cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Memory for the keys and values of all rollouts in progress; 0 = a quarter of the machine's, half of a GPU's."""
    width: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rollouts sampled at once; 0 = what suits the device."""
    bench_seconds: Annotated[float, Field(ge=0, le=600)] = 5.0
    """For measuring the engine before its first work on a base model, unless `width` is set; 0 = do not."""
    memory_limit_bytes: Annotated[int, Field(ge=0)] = 0
    """Memory that the engine may take for itself before it is ended and started narrower; 0 = 80 % of the machine's."""
    capacity_factor: Annotated[int, Field(ge=1, le=64)] = 2
    """Rollouts that the node asks for, as a multiple of its width: work for the time that a round trip takes."""
    stream_s: Annotated[float, Field(ge=0, le=600)] = 5.0
    """Seconds of sampling after which the hub gets what unfinished completions have drawn, so that another node can go
    on with them where this one is cut off; 0 = never; then none is interrupted for a newer version."""
    cost_per_hour: Annotated[float, Field(ge=0, le=MAX_COST_PER_HOUR)] = 0.0
    """US dollars that the hub's operator is to pay for this machine while it is active; 0 = it is a gift, and comes
    before all that cost something. The hub keeps the account; how it is settled is between you and the operator."""
    power_watts: Annotated[float, Field(ge=0, le=MAX_POWER_WATTS)] = 0.0
    """What the machine draws while it works; hubs may count it at their price of electricity. 0 = not stated."""
    swarm_host: str = "0.0.0.0"
    """Address on which other nodes may connect to fetch from this one; 127.0.0.1 keeps them out."""
    swarm_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port for that; 0 = any free one."""
    mesh_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port, at `swarm_host` too, on which other nodes hand on what the hub sends; 0 = any free one."""
    upload_limit_bytes_s: Annotated[int, Field(ge=0)] = 0
    """Upload to other nodes: at most half of it for handing on, and half for BitTorrent, which does not count nodes of
    the local network; 0 = unlimited."""
    download_limit_bytes_s: Annotated[int, Field(ge=0)] = 0
    """Download: at most half of it for what the hub and other nodes push, and half for BitTorrent and the hub's web
    seed, which do not count nodes of the local network; 0 = unlimited."""
    cage: CageMode = "auto"
    """Whether the engine, which reads what a hub sends, is kept from your files, the network and other programs: auto =
    as far as the system can; required = it does not start where something of that is missing; off = not at all."""
    insecure: bool = False
    """Allow an unencrypted connection to a hub on another machine."""
    reconnect_first_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Wait before the first attempt to connect again; later ones wait longer, up to a minute."""
    stay: bool = False
    """When a run is finished and its hub stops: wait for the hub, whose operator may extend the run, and go on then.
    Else the node ends with the run."""
    manners: MannersConfig = MannersConfig()
    """When the node leaves the machine to its owner."""
    update: UpdateMode = "tell"
    """Whether to say so when the hub runs a newer release than this node, and how to get it. A node that is too old to
    be let in says so in any case; by auto, and by nothing else, it then runs the installer that it came with, with the
    source that it came from, once a day at most. It runs nothing from a hub."""
    exit_with_stdin: bool = False
    """Stop when standard input ends: for a program that starts a node and must not leave it behind."""

    @model_validator(mode="after")
    def _check_helpers(self) -> Self:
        for helper in self.helpers:
            HelperAddress.parse(helper)
        if self.helpers and self.backend not in ("auto", "llama_cpp"):
            raise ConfigError(
                "Only llama.cpp spreads a model over several machines.",
                got=f"backend {self.backend}, {len(self.helpers)} helpers",
                do="Leave --backend out, or --with.",
            )
        return self

    @property
    def upload_share_bytes_s(self) -> int:
        """What each of the two ways of sending may take of `upload_limit_bytes_s`; 0 = unlimited."""
        return (self.upload_limit_bytes_s + 1) // 2

    @property
    def download_share_bytes_s(self) -> int:
        """What each of the two ways of receiving may take of `download_limit_bytes_s`; 0 = unlimited."""
        return (self.download_limit_bytes_s + 1) // 2

    @property
    def wanted_backend(self) -> BackendName:
        """The engine to choose."""
        return "llama_cpp" if self.helpers else self.backend


def load_config(path: Path | None, overrides: Mapping[str, Any]) -> NodeConfig:
    """The settings that hold. `path` None = no file; `overrides` are flags, None = not given.

    Raises ConfigError, which names the setting, its value and the line, variable or flag that set it.
    """
    return load_settings(NodeConfig, path, overrides, other_variables=(HOME_VARIABLE,))
