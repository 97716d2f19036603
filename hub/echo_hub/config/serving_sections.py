"""Settings of the hub's ports, of the dissemination of versions, and of the data that the hub keeps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from echo_hub.config.section import Port, Precision, Section
from echo_shared.artefacts.manifest import DELTA_REACH
from echo_shared.settings import SECRET, SecretText


class ServerConfig(Section):
    """The hub's ports and addresses, and the conditions for joining."""

    host: str = "127.0.0.1"
    """Address on which the hub listens. With 0.0.0.0, other machines can connect; over the internet, use TLS here or in
    a proxy."""
    port: Port = 8710
    """The only TCP port that nodes and browsers need."""
    public_url: Annotated[str, Field(pattern=r"^(https?://[^/]+.*)?$")] = ""
    """The hub's address for nodes. Set it if this is not http://host:port, for example if it is a proxy's address."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses of proxies in front of the hub. If a request comes from one of them, the hub takes the client's address
    from the X-Forwarded-For header."""
    tls_certificate: str = ""
    """PEM file with the certificate and its chain. If set, the port speaks TLS (https, wss). If the file is renewed,
    the hub loads it again."""
    tls_key: str = ""
    """PEM file with the private key of tls_certificate. The key must have no password."""
    swarm_port: Port = 0
    """BitTorrent port of the hub's own peer; 0 = any free port."""
    router_ports: bool = False
    """Ask the router, by UPnP, NAT-PMP or PCP, to open `port` and `swarm_port` while the hub runs. Meant for a hub at
    home, behind a router that opens no ports by default."""
    shared_memory: bool = True
    """Let nodes on the hub's own host read new versions from memory instead of the swarm, if the same user runs
    them and the hub (Linux only). After the first such node has connected, the hub holds the newest two
    adapters in memory."""
    join: Literal["open", "invite"] = "open"
    """Who may join. open: any node. invite: nodes with an invite (echo-hub invite) or with one of the invite_tokens."""
    install_from: str = ""
    """Directory that `make wheelhouse` has made, dist/serve. The hub serves it, and its pages show one line that
    installs the node and joins. Volunteers run this code and trust you with it. Empty = off."""
    invite_tokens: Annotated[
        tuple[Annotated[str, Field(min_length=8, max_length=256)], ...], Field(repr=False), SECRET
    ] = ()
    """With join = "invite": tokens, each of which admits any number of nodes. A token needs at least 8 characters."""
    heartbeat_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Seconds between two reports of a node."""
    joins_per_s: Annotated[float, Field(ge=0.01, le=10_000)] = 50.0
    """Largest number of nodes that may join per second. Further nodes wait in a queue. Nodes whose earlier work was
    useful go first, and addresses take turns."""
    connections_per_s: Annotated[float, Field(ge=1, le=1_000_000)] = 1_000.0
    """Largest number of new connections per second. After a quiet time, up to four times this number may come at once.
    The same holds for the next three settings (of connections and requests per second). Connections from
    trusted_proxies do not count."""
    connections_per_s_per_address: Annotated[float, Field(ge=1, le=1_000_000)] = 250.0
    """Largest number of new connections per second from one address (IPv6: one /64)."""
    requests_per_s: Annotated[float, Field(ge=1, le=1_000_000)] = 2_000.0
    """Largest number of HTTP requests per second, not counting requests for files by nodes that have joined."""
    requests_per_s_per_address: Annotated[float, Field(ge=1, le=1_000_000)] = 500.0
    """Largest number of HTTP requests per second from one address, also behind a proxy in trusted_proxies."""
    max_connections: Annotated[int, Field(ge=16, le=1_000_000)] = 10_000
    """Largest number of open connections of nodes and browsers. When nodes hold three quarters of it, only nodes with
    an invite or earlier useful work get in. The hub raises its own limit of open files accordingly, if the system
    allows."""
    max_strangers: Annotated[int, Field(ge=8, le=1_000_000)] = 2_000
    """Largest number of open connections of browsers and of clients that have not proven to be nodes."""
    max_strangers_per_address: Annotated[int, Field(ge=4, le=1_000_000)] = 1_024
    """Largest number of open connections from one address (IPv6: one /64) that have not proven to be a node's. At the
    limit, the hub closes the oldest connection without a request; if all have requests, the slowest reader's
    connection, else the newest connection. Nodes behind one NAT or proxy share this number."""
    max_nodes_per_address: Annotated[int, Field(ge=1, le=1_000_000)] = 2_000
    """Largest number of connections of nodes from one address. Raise the number if more nodes are behind one NAT. If
    they are behind a proxy, list the proxy in trusted_proxies instead, so that its clients' addresses count."""

    try_device: Annotated[str, Field(pattern=r"^(off|auto|cpu|mps|cuda(:\d+)?)$")] = "cpu"
    """Device of the operator's page Try it, where versions can be sampled: cpu, auto, cuda, cuda:1, mps; or off. The
    page's process holds a copy of the base model while it is used, and ends after five idle minutes. cpu leaves the
    learner's GPU alone."""

    @model_validator(mode="after")
    def _has_both_or_neither(self) -> ServerConfig:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key belong together: set both, or neither")
        return self


class DisseminationConfig(Section):
    """How the base model and new versions reach the nodes."""

    way: Literal["auto", "inline", "broadcast", "swarm", "web_seed"] = "auto"
    """inline: the hub sends a new version to each node. broadcast: the hub sends every part to one node, which forwards
    it. swarm: BitTorrent. web_seed: HTTP from the hub. auto: for each version, the way with the shortest estimated
    time. If a way fails, the node uses the swarm, and if the swarm fails too, the web seed."""
    base: Literal["swarm", "model_hub"] = "swarm"
    """Source from which nodes fetch the base model: swarm (the hub and other nodes), or model_hub, by the id in
    model.base. In both cases, nodes check the files. If a node cannot reach the model hub, it uses the swarm."""
    precision: Precision = "auto"
    """Precision of published adapters. The hub itself samples with the same precision. Training continues in float32.
    auto: bfloat16 if the learner computes in bfloat16 (learner.precision) and so rounds the adapter anyway, else
    float32. bfloat16 makes a version 4.5 to 6 times smaller as a difference, and 2.4 times as a whole; with a float32
    learner it shifts the sampling policy by a KL of 1e-10 to 2e-8. May change between two starts."""
    delta_reach: Annotated[int, Field(ge=0, le=DELTA_REACH)] = DELTA_REACH
    """Number of earlier versions from which a node may get a new version as a delta (the difference of the two). A
    delta is sent if it is smaller than the whole version. 0 = versions are always sent whole."""
    punching: bool = True
    """Help nodes behind home routers to connect to each other, so that they pass new versions on. The hub tells each of
    two such nodes the other's public address and port; the nodes then connect at the same time. If false and neither of
    two nodes accepts connections, both get everything from the hub."""
    uplink_mbit_s: Annotated[float, Field(ge=0)] = 0.0
    """The hub's upload capacity for all nodes together, in Mbit/s; 0 = the hub measures it."""


class StoreConfig(Section):
    """The database of rollouts and receipts."""

    url: SecretText = ""
    """An SQLAlchemy URL; empty = SQLite in the run directory."""


class KeepingConfig(Section):
    """Rollouts that are kept for the operator when the hub no longer needs them. Receipts and totals are kept forever.
    May change between two starts."""

    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of groups whose completions are kept, with their log-probabilities: 1 = all, 0 = none."""
    max_bytes: Annotated[int, Field(ge=0)] = 500_000_000
    """Largest number of bytes of kept completions in the database, about 8 bytes per token. Above it, the oldest are
    deleted."""
    steps: Annotated[int, Field(ge=0)] = 0
    """Number of newest steps whose rollouts keep a database row with rewards, times and completion. Rows of older steps
    are deleted. 0 = all rows are kept. `echo-hub archive` writes rows to files."""
    answered_days: Annotated[float, Field(ge=0, le=36_500)] = 30.0
    """Days for which a sample for a tenant keeps its database row. 0 = all rows are kept. The row's tokens are deleted
    minutes after the sample was delivered."""
