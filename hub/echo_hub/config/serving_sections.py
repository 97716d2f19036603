"""What the hub listens on, how new versions leave it, and what it keeps."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from echo_hub.config.section import Port, Precision, Section
from echo_shared.artefacts import DELTA_REACH
from echo_shared.settings import SECRET, SecretText


class ServerConfig(Section):
    """What the hub listens on, and who may join."""

    host: str = "127.0.0.1"
    """0.0.0.0 to let other machines in; over the internet with TLS, here or by a proxy in front."""
    port: Port = 8710
    """The only TCP port that nodes and browsers need."""
    public_url: Annotated[str, Field(pattern=r"^(https?://[^/]+.*)?$")] = ""
    """The address that nodes use, if it is not http://host:port (a proxy's, for example)."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses of proxies in front of the hub: what they say in X-Forwarded-For is taken for the client's address."""
    tls_certificate: str = ""
    """A PEM file with the certificate and its chain: the port then speaks TLS (https, wss). A new one is taken over."""
    tls_key: str = ""
    """The PEM file with its private key, which has no password."""
    swarm_port: Port = 0
    """BitTorrent port of the hub's own peer; 0 = any free one."""
    shared_memory: bool = True
    """Nodes on the hub's own host, run by the hub's own user, read new versions from memory, without the swarm (on
    Linux). From the first connection of such a node on, the hub holds the newest two adapters in memory for it."""
    join: Literal["open", "invite"] = "open"
    """open: anyone. invite: whoever comes by an invite (echo-hub invite), or has one of the invite_tokens."""
    install_from: str = ""
    """A directory that `make wheelhouse` made, dist/serve: the hub then serves it, and its pages show the one line that
    installs from it and joins. Volunteers run what is in there: they trust you with that. Empty: nothing is served."""
    invite_tokens: Annotated[
        tuple[Annotated[str, Field(min_length=8, max_length=256)], ...], Field(repr=False), SECRET
    ] = ()
    """With join = "invite": any one of these lets any number of nodes in. At least 8 characters each."""
    heartbeat_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Nodes report this often."""
    joins_per_s: Annotated[float, Field(ge=0.01, le=10_000)] = 50.0
    """Nodes that the hub takes in each second. Others wait for their turn: those whose work was of use before go first,
    and addresses take turns."""
    connections_per_s: Annotated[float, Field(ge=1, le=1_000_000)] = 1_000.0
    """New connections that the hub takes each second, and after a while without any four times as many at once, as for
    the next three. Connections from trusted_proxies do not count."""
    connections_per_s_per_address: Annotated[float, Field(ge=1, le=1_000_000)] = 250.0
    """Of them from one address; of IPv6, from one /64."""
    requests_per_s: Annotated[float, Field(ge=1, le=1_000_000)] = 2_000.0
    """HTTP requests that the hub answers each second, but for those for files by nodes that have joined."""
    requests_per_s_per_address: Annotated[float, Field(ge=1, le=1_000_000)] = 500.0
    """Of them for one address, behind a proxy in trusted_proxies too."""
    max_connections: Annotated[int, Field(ge=16, le=1_000_000)] = 10_000
    """Open at once, of nodes and browsers together. Nodes that are neither invited nor were of use before find no room
    once nodes have three quarters of them. The hub raises its own limit of open files for as many, as far as the system
    lets it."""
    max_strangers: Annotated[int, Field(ge=8, le=1_000_000)] = 2_000
    """Of them, those that have not shown that they are a node's: browsers, and whoever else reaches the port."""
    max_strangers_per_address: Annotated[int, Field(ge=4, le=1_000_000)] = 1_024
    """Of these from one address; of IPv6, from one /64. For one too many, the oldest that has not sent its request is
    closed, else the one that has been reading its answer for longest, else the newest. Nodes that reach the hub from
    behind one NAT or proxy share this."""
    max_nodes_per_address: Annotated[int, Field(ge=1, le=1_000_000)] = 2_000
    """Connections of nodes from one address. More nodes than that behind one NAT need more; a proxy in front of the hub
    belongs into trusted_proxies, so that its clients' addresses count."""

    @model_validator(mode="after")
    def _has_both_or_neither(self) -> ServerConfig:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key belong together: set both, or neither")
        return self


class DisseminationConfig(Section):
    """How the base model and every new version get to the nodes."""

    way: Literal["auto", "inline", "broadcast", "swarm", "web_seed"] = "auto"
    """inline: the hub sends a new version to each node. broadcast: it sends every part to one node, which hands it on
    to the others. swarm: BitTorrent. web_seed: HTTP from the hub. auto: for each version what is likely the soonest.
    Where a way fails, a node turns to the swarm, then to the web seed."""
    base: Literal["swarm", "model_hub"] = "swarm"
    """Where nodes get the base model: from the hub and each other, or from the model hub that model.base is an id on.
    The files are checked either way, and a node that cannot reach the model hub turns to the swarm."""
    precision: Precision = "auto"
    """Of adapters as they are published, and as the hub itself samples from them; training goes on from float32. auto:
    bfloat16 where the learner computes in it (learner.precision), which loses nothing, for then it rounds the adapter
    too; else float32. bfloat16 makes a version 4.5 to 6 times smaller as a difference from the one before, 2.4 times
    whole; beside a learner in float32 it puts the sampling policy off by a KL of 1e-10 to 2e-8. May be changed between
    two starts."""
    delta_reach: Annotated[int, Field(ge=0, le=DELTA_REACH)] = DELTA_REACH
    """A version travels as its difference from one that the nodes have, where that is smaller: one of this many
    versions published before it. 0 = always whole."""
    uplink_mbit_s: Annotated[float, Field(ge=0)] = 0.0
    """What the hub can send to all nodes together; 0 = measured."""


class StoreConfig(Section):
    """Where rollouts and receipts are kept."""

    url: SecretText = ""
    """An SQLAlchemy URL; empty = SQLite in the run directory."""


class KeepingConfig(Section):
    """What is kept of rollouts for the operator to look at, once the hub itself does not need them any more. Receipts
    and totals are kept of all, for ever. May be changed between two starts."""

    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of all groups, those whose completions are kept, with their log-probabilities: 1 = all, 0 = none."""
    max_bytes: Annotated[int, Field(ge=0)] = 500_000_000
    """How much of them is kept, in the store: about 8 bytes a token. Above it the oldest are deleted."""
    steps: Annotated[int, Field(ge=0)] = 0
    """Of so many of the newest steps the store keeps a row for each rollout, with rewards, times and what is kept of
    its completion; those of older steps are deleted. 0 = all are kept. `echo-hub archive` writes them to files."""
