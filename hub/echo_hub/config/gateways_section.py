"""Settings of gateway processes, which hold nodes' connections for the hub, and of the broker between them."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from echo_hub.config.section import Port, Section
from echo_shared.settings import SecretText


class GatewaysConfig(Section):
    """`echo-hub gateway` processes, on this machine or others, hold nodes' connections for the hub, and pass on nodes'
    messages through NATS JetStream. Without them the hub holds all connections itself, and needs no broker."""

    url: Annotated[SecretText, Field(pattern=r"^((nats|tls)://[^,\s]+(,(nats|tls)://[^,\s]+)*)?$")] = ""
    """The NATS server, nats://USER:PASSWORD@HOST:4222, or all servers of a cluster, separated by commas; tls://
    encrypts. Empty = no gateways."""
    tls_ca: str = ""
    """PEM file with the authorities for the NATS server's certificate; empty = the system's own."""
    tls_certificate: str = ""
    """PEM file with the certificate that hub and gateways present to the NATS server, if it requires one."""
    tls_key: str = ""
    """PEM file with the private key of tls_certificate, without a password."""
    replicas: Annotated[int, Field(ge=1, le=5)] = 1
    """NATS servers that must have a rollout on disk before its node gets the receipt; more than 1 needs a cluster."""
    max_bytes: Annotated[int, Field(ge=2**24)] = 2**30
    """Most bytes that NATS keeps of rollouts which the hub has not committed yet. At this limit, nodes keep their
    rollouts and send them again later."""
    host: str = ""
    """Address that gateways listen on; empty = server.host."""
    port: Port = 8711
    """Port that gateways listen on, with the certificate of [server]; several on one machine share it."""
    hub_url: Annotated[str, Field(pattern=r"^(https?://[^/]+)?$")] = ""
    """The hub's address for gateways, which forward requests for files, pages and records to it. Empty = the hub's own
    address on this machine. List the gateways' addresses in server.trusted_proxies."""

    @model_validator(mode="after")
    def _has_both_or_neither(self) -> GatewaysConfig:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key belong together: set both, or neither")
        return self
