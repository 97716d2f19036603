"""Processes that hold nodes' connections for the hub, and the broker between them and it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from echo_hub.config.section import Port, Section
from echo_shared.settings import SecretText


class GatewaysConfig(Section):
    """`echo-hub gateway` processes, here or on other machines, that hold nodes' connections for the hub and hand on
    through NATS JetStream what nodes send. Without them the hub holds all connections itself, and needs no broker."""

    url: Annotated[SecretText, Field(pattern=r"^((nats|tls)://[^,\s]+(,(nats|tls)://[^,\s]+)*)?$")] = ""
    """The NATS server, nats://USER:PASSWORD@HOST:4222, or with commas all of a cluster's; tls:// encrypts. Empty: there
    are no gateways."""
    tls_ca: str = ""
    """A PEM file with the certificates by which the NATS server's is checked; empty = the system's own."""
    tls_certificate: str = ""
    """A PEM file with the certificate that hub and gateways show the NATS server, where it asks for one."""
    tls_key: str = ""
    """The PEM file with its private key, which has no password."""
    replicas: Annotated[int, Field(ge=1, le=5)] = 1
    """NATS servers that have a rollout on disk before its node is told that it is received; more than 1 takes a
    cluster."""
    max_bytes: Annotated[int, Field(ge=2**24)] = 2**30
    """What NATS keeps of what the hub has not committed yet. When it is full, nodes keep what they send, and send it
    again later."""
    host: str = ""
    """Address that gateways listen on; empty = server.host."""
    port: Port = 8711
    """Port that gateways listen on, with the certificate of [server]; several on one machine share it."""
    hub_url: Annotated[str, Field(pattern=r"^(https?://[^/]+)?$")] = ""
    """Where gateways reach the hub: there they get the files, pages and books that others ask them for. Empty = the
    hub's own address on this machine. Their addresses belong into server.trusted_proxies."""

    @model_validator(mode="after")
    def _has_both_or_neither(self) -> GatewaysConfig:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key belong together: set both, or neither")
        return self
