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
    """All settings. config.toml holds them at its top level, except for the table [manners]."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # `echo-node config list` prints the docstrings.
        env_prefix="ECHO_NODE_",
        env_nested_delimiter="__",
    )

    name: Annotated[str, Field(max_length=64), AfterValidator(lambda name: name and checked_name(name))] = ""
    """Name on the hub's pages, different from other nodes' names; empty = a name made from the node's id."""
    invite_token: Annotated[SecretText, Field(max_length=256)] = ""
    """Token for hubs that admit only invited nodes. Stored for later runs once a hub has accepted it."""
    backend: BackendName = "auto"
    """The sampling engine; auto = the best one that this machine can run."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads of the engine; 0 = the engine chooses."""
    helpers: Annotated[tuple[str, ...], Field(repr=False), SECRET] = ()
    """HOST:PORT#CODE of machines that each hold a part of the model, as `echo-node lend` prints it there."""
    precision: PrecisionName = "auto"
    """Precision of the engine's weights; auto = exact for small models, else 16 bits, or 8 if memory is short."""
    kv_cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Memory for the keys and values of all rollouts in progress; 0 = a quarter of the machine's memory, half of a
    GPU's.
    """
    width: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rollouts sampled at once; 0 = suited to the device."""
    bench_seconds: Annotated[float, Field(ge=0, le=600)] = 5.0
    """Seconds to measure the engine before its first work on a base model, unless `width` is set; 0 = no
    measurement.
    """
    memory_limit_bytes: Annotated[int, Field(ge=0)] = 0
    """Memory limit of the engine. Above it, the engine is restarted with a smaller width; 0 = 80 % of the machine's
    memory.
    """
    capacity_factor: Annotated[int, Field(ge=1, le=64)] = 2
    """Rollouts that the node requests, as a multiple of its width. The surplus covers the time of a round trip."""
    stream_s: Annotated[float, Field(ge=0, le=600)] = 5.0
    """Seconds of sampling between two reports of partial completions to the hub. If this node is cut off, another node
    continues from them. 0 = no reports, and no interruption for a newer version.
    """
    cost_per_hour: Annotated[float, Field(ge=0, le=MAX_COST_PER_HOUR)] = 0.0
    """US dollars per hour that the hub's operator should pay for this machine while it is active; 0 = a gift, which
    hubs use before paid machines. The hub keeps the account; you settle it with the operator.
    """
    power_watts: Annotated[float, Field(ge=0, le=MAX_POWER_WATTS)] = 0.0
    """Power in watts of the machine at work; hubs may count it at their price of electricity. 0 = not stated."""
    swarm_host: str = "0.0.0.0"
    """Address on which other nodes may connect to fetch from this one; 127.0.0.1 keeps them out."""
    swarm_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port for fetches at `swarm_host`; 0 = any free port."""
    mesh_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port at `swarm_host` on which other nodes forward pieces from the hub; 0 = any free port."""
    upload_limit_bytes_s: Annotated[int, Field(ge=0)] = 0
    """Upload limit to other nodes. Forwarding gets at most half, BitTorrent the other half, which does not count nodes
    of the local network; 0 = unlimited.
    """
    download_limit_bytes_s: Annotated[int, Field(ge=0)] = 0
    """Download limit. Pieces pushed by the hub and other nodes get at most half, BitTorrent and the hub's web seed the
    other half, which does not count nodes of the local network; 0 = unlimited.
    """
    cage: CageMode = "auto"
    """Cage that keeps the engine, which reads a hub's data, from your files, the network and other programs: auto = as
    far as the system can; required = the engine does not start without a complete cage; off = no cage.
    """
    insecure: bool = False
    """Allow an unencrypted connection to a hub on another machine."""
    reconnect_first_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Wait before the first reconnect; later waits grow up to a minute."""
    stay: bool = False
    """After a run has finished and its hub stops: true = wait for the hub, whose operator may extend the run; false =
    stop the node.
    """
    manners: MannersConfig = MannersConfig()
    """Rules for when the node leaves the machine to its owner."""
    update: UpdateMode = "tell"
    """Updates when the hub runs a newer release: tell = show the release and the command that installs it. auto = if
    the hub refuses this release, also run the node's own installer with its own source, once a day at most. Nothing
    from a hub is ever run.
    """
    exit_with_stdin: bool = False
    """Stop when standard input ends: for a program that starts a node and must not leave it running."""

    @model_validator(mode="after")
    def _check_helpers(self) -> Self:
        for helper in self.helpers:
            HelperAddress.parse(helper)
        if self.helpers and self.backend not in ("auto", "llama_cpp"):
            raise ConfigError(
                "Only llama.cpp spreads a model over several machines.",
                got=f"backend {self.backend}, {len(self.helpers)} helpers",
                do="Omit --backend, or omit --with.",
            )
        return self

    @property
    def upload_share_bytes_s(self) -> int:
        """Limit for each of the two ways of sending, from `upload_limit_bytes_s`; 0 = unlimited."""
        return (self.upload_limit_bytes_s + 1) // 2

    @property
    def download_share_bytes_s(self) -> int:
        """Limit for each of the two ways of receiving, from `download_limit_bytes_s`; 0 = unlimited."""
        return (self.download_limit_bytes_s + 1) // 2

    @property
    def wanted_backend(self) -> BackendName:
        """The requested engine; helpers need llama.cpp."""
        return "llama_cpp" if self.helpers else self.backend


def load_config(path: Path | None, overrides: Mapping[str, Any]) -> NodeConfig:
    """Load the settings in force. `path` None = no file; `overrides` are flags, None = not given.

    Raises ConfigError, which names the setting, its value, and the line, variable or flag that set it.
    """
    return load_settings(NodeConfig, path, overrides, other_variables=(HOME_VARIABLE,))
