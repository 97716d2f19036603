"""Settings of gateways and of their broker. Gateways are processes that hold nodes' connections for the hub; the broker
carries messages between them and the hub."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from echo_hub.config.section import Port, Section
from echo_shared.settings import SecretText


class GatewaysConfig(Section):
    """`echo-hub gateway` processes, on this machine or others, hold nodes' connections for the hub. They pass on nodes'
    messages through NATS JetStream. Without gateways, the hub holds all connections itself and needs no broker."""

    url: Annotated[SecretText, Field(pattern=r"^((nats|tls)://[^,\s]+(,(nats|tls)://[^,\s]+)*)?$")] = ""
    """The NATS server, nats://USER:PASSWORD@HOST:4222, or all servers of a cluster, separated by commas. With tls://
    the connection is encrypted. Empty = no gateways."""
    tls_ca: str = ""
    """PEM file with the authorities that may sign the NATS server's certificate; empty = the system's authorities."""
    tls_certificate: str = ""
    """PEM file with the certificate that hub and gateways show to the NATS server, if the server requires one."""
    tls_key: str = ""
    """PEM file with the private key of tls_certificate. The key must have no password."""
    replicas: Annotated[int, Field(ge=1, le=5)] = 1
    """Number of NATS servers that must have a rollout on disk before its node gets the receipt. More than 1 needs a
    NATS cluster."""
    max_bytes: Annotated[int, Field(ge=2**24)] = 2**30
    """Largest number of bytes of rollouts that NATS keeps until the hub has committed them. At this limit, NATS accepts
    no more: nodes keep their rollouts and send them again later."""
    host: str = ""
    """Address on which gateways listen; empty = server.host."""
    port: Port = 8711
    """Port on which gateways listen, with the certificate of [server]. Several gateways on one machine share the
    port."""
    hub_url: Annotated[str, Field(pattern=r"^(https?://[^/]+)?$")] = ""
    """The hub's address for gateways, which forward requests for files, pages and records to it. Empty = the hub's own
    address on this machine. List the gateways' addresses in server.trusted_proxies, so that the hub sees the clients'
    own addresses."""

    @model_validator(mode="after")
    def _has_both_or_neither(self) -> GatewaysConfig:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key belong together: set both, or neither")
        return self
