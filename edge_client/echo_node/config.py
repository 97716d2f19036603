"""A node's settings: defaults < config.toml < ECHO_NODE_* environment < flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from echo_node.core.manners import MannersConfig
from echo_node.core.updating import UpdateMode
from echo_node.host.devices import check_names
from echo_node.host.paths import HOME_VARIABLE
from echo_node.lending.pairing import HelperAddress
from echo_shared.cage.description import CageMode
from echo_shared.described import Described
from echo_shared.errors import ConfigError
from echo_shared.settings import SECRET, SecretText, load_settings
from echo_shared.wire.messages import MAX_COST_PER_HOUR, MAX_POWER_WATTS, MAX_REFUSED_TENANTS
from echo_shared.wire.messages.shown_names import checked_name

BackendName = Literal["auto", "llama_cpp", "mlx", "torch", "vllm"]

PrecisionName = Literal["auto", "f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q4_k_m", "q4_0", "q3_k_m"]


def _as_list(value: Any) -> Any:
    """Return a single text as a list of one."""
    return [value] if isinstance(value, str) else value


TenantName = Annotated[str, Field(min_length=1, max_length=64)]


class NodeConfig(Described, BaseSettings):
    """All settings of a node. config.toml holds them at its top level, except for the table [manners].
    `echo-node config list` shows the fields' docstrings.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        allow_inf_nan=False,
        env_prefix="ECHO_NODE_",
        env_nested_delimiter="__",
    )

    name: Annotated[str, Field(max_length=64), AfterValidator(lambda name: name and checked_name(name))] = ""
    """Name on the hub's pages, which must not look like another node's name; empty = a name made from the node's id."""
    invite_token: Annotated[SecretText, Field(max_length=256)] = ""
    """Token for hubs that admit only invited nodes; stored for later runs once a hub has accepted it."""
    backend: BackendName = "auto"
    """The sampling engine; auto = the best one that this machine can run."""
    devices: Annotated[tuple[str, ...], Field(max_length=32), BeforeValidator(_as_list)] = ()
    """Devices with one engine each, such as ["cuda:0", "cuda:1"], or ["all"] for all GPUs; ["cpu"] for the processor;
    empty = one engine on the best device. All devices must be of one kind.
    """
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """Maximum CPU threads of all engines, which use fewer while other programs use the cores. 0 = one for each core."""
    helpers: Annotated[tuple[str, ...], Field(repr=False), SECRET] = ()
    """HOST:PORT#CODE of other machines that each hold a part of the model, as `echo-node lend` prints it there."""
    precision: PrecisionName = "auto"
    """Precision of the engine's weights; auto = float32 for small models, else 16 bits, or 8 if these need too much
    memory."""
    kv_cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Bytes of memory for the keys and values of all unfinished rollouts of an engine; 0 = a quarter of the machine's
    memory, or half of a GPU's.
    """
    kept_keys_share: Annotated[float, Field(ge=0, le=4)] = 0.25
    """Memory for keys and values of finished rollouts, which later turns of the same conversations need not compute
    again, as a share of the memory of `kv_cache_bytes`; 0 = keep none. The least recently used ones are dropped first.
    """
    width: Annotated[int, Field(ge=0, le=1024)] = 0
    """Maximum number of rollouts that an engine samples at the same time; 0 = chosen for the device."""
    bench_seconds: Annotated[float, Field(ge=0, le=600)] = 5.0
    """Seconds of measuring the engine before its first work on a base model, unless `width` is set; 0 = no
    measurement.
    """
    memory_limit_bytes: Annotated[int, Field(ge=0)] = 0
    """Maximum memory of each engine in bytes; beyond it the engine restarts with a smaller width. 0 = 80 % of the
    machine's memory, divided by the number of engines.
    """
    capacity_factor: Annotated[int, Field(ge=1, le=64)] = 2
    """Number of rollouts that the node asks for, as a multiple of its width; a multiple covers the round trip to the
    hub.
    """
    stream_s: Annotated[float, Field(ge=0, le=600)] = 5.0
    """Seconds of sampling between reports of unfinished completions to the hub, so that another node can continue them
    after a failure; 0 = no reports, and no switch to a newer version in mid-completion.
    """
    cost_per_hour: Annotated[float, Field(ge=0, le=MAX_COST_PER_HOUR)] = 0.0
    """US dollars per hour that the hub's operator is to pay while this machine is active; 0 = a gift. Gifts work before
    paid nodes. The hub keeps the account; you settle it with the operator.
    """
    power_watts: Annotated[float, Field(ge=0, le=MAX_POWER_WATTS)] = 0.0
    """Power of the machine at work, in watts; hubs may charge it at their price of electricity. 0 = not stated."""
    answers: bool = True
    """Work for tenants of the hub, too: the hub's operator lets other people's programs sample on its nodes. False:
    work only for the run's own training and evaluations.
    """
    refused_tenants: Annotated[tuple[TenantName, ...], Field(max_length=MAX_REFUSED_TENANTS)] = ()
    """Names of tenants for which this node does not work, as `echo-node status` shows them."""
    swarm_host: str = "0.0.0.0"
    """Address on which other nodes may connect to fetch from this node; 127.0.0.1 refuses other machines. With 0.0.0.0,
    all addresses, BitTorrent also takes those of IPv6.
    """
    swarm_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP and UDP port for connections of other nodes that fetch from this node; 0 = any free port."""
    mesh_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port, also at `swarm_host`, on which other nodes forward pieces from the hub; 0 = any free port."""
    router_ports: bool = True
    """Ask the home's router, by UPnP, NAT-PMP or PCP, to open `swarm_port` and `mesh_port` while the node runs, so that
    other nodes can connect to it. False: do not ask.
    """
    punching: bool = True
    """Link with nodes behind other routers by hole punching, if neither router accepts connections. The hub arranges
    the moment at which both nodes connect; the router opens no port for third machines. False: the hub alone serves
    such pairs of nodes.
    """
    upload_limit_bytes_s: Annotated[int, Field(ge=0)] = 0
    """Upload rate to other nodes in bytes per second: at most half of it for forwarding pieces, and half for
    BitTorrent, which does not count nodes of the local network; 0 = unlimited.
    """
    download_limit_bytes_s: Annotated[int, Field(ge=0)] = 0
    """Download rate in bytes per second: at most half of it for pieces from the hub and other nodes, and half for
    BitTorrent and the hub's web seed, which do not count nodes of the local network; 0 = unlimited.
    """
    cage: CageMode = "auto"
    """Cage (sandbox) of the engine, which loads files from a hub: no access to your files, the network and other
    programs. auto = as far as the system allows; required = the engine does not start if a protection is missing; off =
    no cage.
    """
    insecure: bool = False
    """Allow an unencrypted connection to a hub on another machine."""
    reconnect_first_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Seconds before the first attempt to reconnect; later pauses grow, up to a minute."""
    stay: bool = False
    """After a finished run, wait for the hub, whose operator may extend the run, and continue then. Otherwise the node
    stops when the run ends.
    """
    manners: MannersConfig = MannersConfig()
    """Conditions under which the node leaves the machine to its owner."""
    update: UpdateMode = "tell"
    """tell: report a newer release that the hub names, with the upgrade command. never: report no newer release. auto:
    if the hub refuses this node as too old, run the node's own installer with the installer's own source, at most once
    a day; nothing from a hub is run. A node that is too old to join reports that in any case.
    """
    exit_with_stdin: bool = False
    """Stop when standard input ends, for a program that starts a node and must not leave it behind."""

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

    @model_validator(mode="after")
    def _check_devices(self) -> Self:
        check_names(self.devices)
        if self.helpers and self.devices:
            raise ConfigError(
                "A model that is spread over several machines has one engine, which chooses its own device.",
                got=f"devices {', '.join(self.devices)}, {len(self.helpers)} helpers",
                do="Omit --device, or omit --with.",
            )
        return self

    @property
    def upload_share_bytes_s(self) -> int:
        """Limit in bytes per second for each of the two ways of sending (forwarding, BitTorrent); 0 = unlimited."""
        return (self.upload_limit_bytes_s + 1) // 2

    @property
    def download_share_bytes_s(self) -> int:
        """Limit in bytes per second for each of the two ways of receiving (pieces, BitTorrent); 0 = unlimited."""
        return (self.download_limit_bytes_s + 1) // 2

    @property
    def wanted_backend(self) -> BackendName:
        """The requested engine, or llama.cpp if the model is spread over helpers."""
        return "llama_cpp" if self.helpers else self.backend


def load_config(path: Path | None, overrides: Mapping[str, Any]) -> NodeConfig:
    """Load the settings. `path` None = no file; `overrides` are flags, None = not given.

    Raises ConfigError, which names the setting, its value, and the line, variable or flag that set it.
    """
    return load_settings(NodeConfig, path, overrides, other_variables=(HOME_VARIABLE,))
