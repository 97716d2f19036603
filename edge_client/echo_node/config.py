"""A node's settings: defaults < config.toml < ECHO_NODE_* environment < flags."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

BackendName = Literal["auto", "llama_cpp", "torch"]


class NodeConfig(BaseSettings):
    """All settings; config.toml holds them at its top level."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, env_prefix="ECHO_NODE_")

    name: Annotated[str, Field(max_length=64)] = ""
    """Shown on the hub's pages; empty = one made from the node's id."""
    invite_token: Annotated[str, Field(max_length=256)] = ""
    """Asked for by hubs that admit invited nodes only; kept for later runs once a hub has accepted it."""
    backend: BackendName = "auto"
    """The sampling engine; auto = the best that this machine can run."""
    threads: Annotated[int, Field(ge=0, le=1024)] = 0
    """CPU threads of the engine; 0 = the engine's own choice."""
    width: Annotated[int, Field(ge=0, le=1024)] = 0
    """Rollouts sampled at once; 0 = what suits the device."""
    capacity_factor: Annotated[int, Field(ge=1, le=64)] = 2
    """Rollouts that the node asks for, as a multiple of its width: work for the time that a round trip takes."""
    swarm_host: str = "0.0.0.0"
    """Address on which other nodes may connect to fetch from this one; 127.0.0.1 keeps them out."""
    swarm_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """TCP port for that; 0 = any free one."""
    upload_limit_bytes_s: Annotated[int, Field(ge=0)] = 0
    """Upload to other nodes; 0 = unlimited."""
    insecure: bool = False
    """Allow an unencrypted connection to a hub on another machine."""
    reconnect_first_s: Annotated[float, Field(gt=0, le=60)] = 1.0
    """Wait before the first attempt to connect again; later ones wait longer, up to a minute."""
    exit_with_stdin: bool = False
    """Stop when standard input ends: for a program that starts a node and must not leave it behind."""
