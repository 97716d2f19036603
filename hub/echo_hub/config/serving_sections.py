"""Settings of the hub's ports, the dissemination of versions, and the data it keeps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from echo_hub.config.section import Port, Precision, Section
from echo_shared.artefacts.manifest import DELTA_REACH
from echo_shared.settings import SECRET, SecretText


class ServerConfig(Section):
    """The hub's ports and addresses, and the conditions for joining."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 admits other machines; over the internet, use TLS here or in a proxy."""
    port: Port = 8710
    """The only TCP port that nodes and browsers need."""
    public_url: Annotated[str, Field(pattern=r"^(https?://[^/]+.*)?$")] = ""
    """The nodes' address of the hub, if it is not http://host:port (for example a proxy's)."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses of proxies in front of the hub, whose X-Forwarded-For names the client's address."""
    tls_certificate: str = ""
    """PEM file with the certificate and its chain: the port then speaks TLS (https, wss). The hub loads a renewed
    file."""
    tls_key: str = ""
    """PEM file with the private key of tls_certificate, without a password."""
    swarm_port: Port = 0
    """BitTorrent port of the hub's own peer; 0 = any free one."""
    shared_memory: bool = True
    """Let nodes on the hub's own host, run by the hub's user, read new versions from memory instead of the swarm
    (Linux). From the first connection of such a node on, the hub holds the newest two adapters in memory."""
    join: Literal["open", "invite"] = "open"
    """open: any node. invite: nodes with an invite (echo-hub invite) or one of the invite_tokens."""
    install_from: str = ""
    """Directory made by `make wheelhouse`, dist/serve: the hub serves it, and its pages show one line that installs and
    joins. Volunteers run this code and trust you with it. Empty = off."""
    invite_tokens: Annotated[
        tuple[Annotated[str, Field(min_length=8, max_length=256)], ...], Field(repr=False), SECRET
    ] = ()
    """With join = "invite": tokens that each admit any number of nodes. Each needs at least 8 characters."""
    heartbeat_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Seconds between nodes' reports."""
    joins_per_s: Annotated[float, Field(ge=0.01, le=10_000)] = 50.0
    """Nodes that join each second. Others wait: nodes with earlier useful work go first, and addresses take turns."""
    connections_per_s: Annotated[float, Field(ge=1, le=1_000_000)] = 1_000.0
    """New connections each second. After a quiet time, up to four times this number may come at once; the same holds
    for the next three settings. Connections from trusted_proxies do not count."""
    connections_per_s_per_address: Annotated[float, Field(ge=1, le=1_000_000)] = 250.0
    """New connections each second from one address (IPv6: one /64)."""
    requests_per_s: Annotated[float, Field(ge=1, le=1_000_000)] = 2_000.0
    """HTTP requests each second, except requests for files by nodes that have joined."""
    requests_per_s_per_address: Annotated[float, Field(ge=1, le=1_000_000)] = 500.0
    """HTTP requests each second from one address, also behind a proxy in trusted_proxies."""
    max_connections: Annotated[int, Field(ge=16, le=1_000_000)] = 10_000
    """Open connections of nodes and browsers. Once nodes hold three quarters of them, only nodes with an invite or
    earlier useful work get in. The hub raises its own limit of open files to match, if the system allows."""
    max_strangers: Annotated[int, Field(ge=8, le=1_000_000)] = 2_000
    """Open connections that have not proven to be a node's: browsers and unknown clients."""
    max_strangers_per_address: Annotated[int, Field(ge=4, le=1_000_000)] = 1_024
    """Open connections from one address (IPv6: one /64) that have not proven to be a node's. At the limit the hub
    closes the oldest connection without a request, else the slowest reader, else the newest connection. Nodes behind
    one NAT or proxy share this."""
    max_nodes_per_address: Annotated[int, Field(ge=1, le=1_000_000)] = 2_000
    """Connections of nodes from one address. Raise it for more nodes behind one NAT. List a proxy in trusted_proxies
    instead, so that its clients' addresses count."""

    @model_validator(mode="after")
    def _has_both_or_neither(self) -> ServerConfig:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key belong together: set both, or neither")
        return self


class DisseminationConfig(Section):
    """How the base model and new versions reach the nodes."""

    way: Literal["auto", "inline", "broadcast", "swarm", "web_seed"] = "auto"
    """inline: the hub sends a new version to each node. broadcast: the hub sends every part to one node; that node
    forwards it. swarm: BitTorrent. web_seed: HTTP from the hub. auto: the way with the shortest estimate, for each
    version. If a way fails, a node turns to the swarm, then to the web seed."""
    base: Literal["swarm", "model_hub"] = "swarm"
    """Source of the base model for nodes: swarm (the hub and other nodes), or the model hub with the id model.base.
    Nodes check the files either way, and use the swarm if they cannot reach the model hub."""
    precision: Precision = "auto"
    """Precision of published adapters, which the hub itself also samples with; training continues in float32. auto:
    bfloat16 if the learner computes in it (learner.precision) and so rounds the adapter anyway, else float32. bfloat16
    makes a version 4.5 to 6 times smaller as a difference, 2.4 times as a whole; with a float32 learner it shifts the
    sampling policy by a KL of 1e-10 to 2e-8. May change between two starts."""
    delta_reach: Annotated[int, Field(ge=0, le=DELTA_REACH)] = DELTA_REACH
    """Number of earlier versions considered as delta parents; a version is sent as a delta if that is smaller. 0 =
    always whole."""
    uplink_mbit_s: Annotated[float, Field(ge=0)] = 0.0
    """The hub's upload capacity for all nodes together; 0 = measured."""


class StoreConfig(Section):
    """The database of rollouts and receipts."""

    url: SecretText = ""
    """An SQLAlchemy URL; empty = SQLite in the run directory."""


class KeepingConfig(Section):
    """Rollouts kept for the operator after the hub no longer needs them. Receipts and totals are kept for ever. May
    change between two starts."""

    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of groups whose completions are kept with their log-probabilities: 1 = all, 0 = none."""
    max_bytes: Annotated[int, Field(ge=0)] = 500_000_000
    """Most bytes of kept completions in the database, about 8 bytes a token. Beyond it the oldest are deleted."""
    steps: Annotated[int, Field(ge=0)] = 0
    """Newest steps whose rollouts keep a database row with rewards, times and completion; rows of older steps are
    deleted. 0 = all are kept. `echo-hub archive` writes rows to files."""
