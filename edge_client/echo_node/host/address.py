"""A hub's address: parses the user's input, and builds URLs from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

from echo_shared.errors import ConfigError
from echo_shared.wire.sockets import is_loopback

_PAGE: Final = re.compile(
    r"/+(leaderboard|about|receipts|teams|(nodes|teams)/[^/]*|operator|metrics|healthz|readyz|node|api/v1/[^/]*)/*$|/+$"
)
"""End of a path that the hub itself serves. The part before it is a proxy's prefix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAddress:
    """A hub's address. `origin` is http(s)://host[:port][/prefix], without a final slash."""

    origin: str

    @classmethod
    def parse(cls, url: str, *, insecure: bool) -> HubAddress:
        """Parse a hub's address, or the address of one of its pages.

        Raises ConfigError unless `url` is https, or http to this machine, or `insecure` allows http to any host.
        """
        try:
            parts = urlsplit(url.strip())
            host, _ = parts.hostname, parts.port
        except ValueError as error:
            raise _not_an_address(url, str(error)) from error
        if parts.scheme not in ("http", "https"):
            raise _not_an_address(url, f"scheme {parts.scheme!r}" if parts.scheme else "no scheme")
        if not host:
            raise _not_an_address(url, "no host")
        if parts.username is not None:
            raise _not_an_address(url, "more than scheme, host, port and path")
        if parts.scheme == "http" and not insecure and not is_loopback(host):
            raise ConfigError(
                "This address is not encrypted, and the hub is another machine.",
                got=url,
                do="Use https://, or, in a network that you trust: echo-node join URL --insecure",
                code="insecure",
            )
        return cls(origin=f"{parts.scheme}://{parts.netloc.lower()}{_PAGE.sub('', parts.path)}")

    @property
    def websocket(self) -> str:
        return "ws" + self.origin.removeprefix("http") + "/node"

    @property
    def is_loopback(self) -> bool:
        return is_loopback(urlsplit(self.origin).hostname or "")

    def url(self, path: str) -> str:
        return self.origin + path


def _not_an_address(url: str, got: str) -> ConfigError:
    return ConfigError(
        "This is not the address of a hub.",
        got=f"{url!r}: {got}",
        do="A hub's address looks like https://hub.example.org or http://127.0.0.1:8710",
        code="bad_url",
    )
