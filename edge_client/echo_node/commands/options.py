"""Options that several commands share, and functions that read them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from echo_node.config import NodeConfig, load_config
from echo_node.host.address import HubAddress
from echo_node.host.hubs import Flag, HubRecord, Hubs
from echo_node.host.paths import NodePaths
from echo_shared.errors import ConfigError

DataDir = Annotated[Path | None, typer.Option("--data-dir", help="Directory of the node's files.")]
Name = Annotated[str | None, typer.Option("--name", help="Name on the hub's pages.")]
Backend = Annotated[str | None, typer.Option("--backend", help="Sampling engine: auto, llama_cpp, torch, mlx or vllm.")]
With = Annotated[
    list[str] | None,
    typer.Option("--with", help="HOST:PORT#CODE of a machine that runs `echo-node lend`; may be repeated."),
]
Devices = Annotated[
    list[str] | None,
    typer.Option("--device", help="A device for an engine: all, cuda:0, vulkan:0, cpu ...; may be repeated."),
]
OneDevice = Annotated[
    str | None, typer.Option("--device", help="Only this device of a node with chosen devices, such as cuda:1.")
]
Threads = Annotated[int | None, typer.Option("--threads", help="Most CPU threads of the engine; 0 = one per core.")]
Precision = Annotated[
    str | None,
    typer.Option("--precision", help="Precision of the weights: auto, f32, f16, bf16, q8_0, q4_k_m ..."),
]
Width = Annotated[int | None, typer.Option("--width", help="Rollouts sampled at once; 0 = suited to the device.")]
SwarmPort = Annotated[int | None, typer.Option("--swarm-port", help="TCP port for other nodes; 0 = any free port.")]
MeshPort = Annotated[int | None, typer.Option("--mesh-port", help="TCP port for forwarding; 0 = any free port.")]
SwarmHost = Annotated[str | None, typer.Option("--swarm-host", help="Their address; 127.0.0.1 keeps others out.")]
Cost = Annotated[
    float | None, typer.Option("--cost-per-hour", help="US dollars per hour that this node asks for; 0 = a gift.")
]
Power = Annotated[float | None, typer.Option("--power-watts", help="Power of this machine at work, in watts.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="Print only warnings and errors.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Force = Annotated[bool, typer.Option("--force", help="Do it without asking.")]


def given(**flags: Flag | None) -> dict[str, Flag]:
    """Return the flags that the user gave."""
    return {name: value for name, value in flags.items() if value is not None}


def settings(paths: NodePaths, flags: Mapping[str, Flag]) -> NodeConfig:
    return load_config(paths.config_file if paths.config_file.exists() else None, flags)


def last_hub(paths: NodePaths) -> HubRecord:
    record = Hubs(paths).last()
    if record is None:
        raise ConfigError("This node has joined no hub yet.", got=str(paths.data_dir), do="echo-node join URL")
    return record


def joined_hub(paths: NodePaths, url: str) -> HubRecord:
    """Return the joined hub at this address. Raises ConfigError if the node has not joined it."""
    record = Hubs(paths).at(HubAddress.parse(url, insecure=True).origin)
    if record is None:
        raise ConfigError("This node has not joined that hub.", got=url, do="See those that it has: echo-node hubs")
    return record
