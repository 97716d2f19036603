"""Authentication of the operator on the hub's pages and API."""

from __future__ import annotations

from functools import partial

from aiohttp import web

from echo_hub.config.sections import HubConfig
from echo_hub.dashboard.access.credentials import OperatorCredentials
from echo_hub.dashboard.access.guard import Guard, Visits
from echo_hub.net.client_address import client_ip, is_https, place_of
from echo_hub.net.own_address import requested_address
from echo_hub.run.directory import RunDirectory


def guard_of(config: HubConfig, directory: RunDirectory, *, run_id: str) -> Guard:
    """Return the guard, which authenticates requests to the operator's pages and API. Raises ConfigError if the
    operator's token cannot be read or made."""
    proxies = config.server.trusted_proxies
    credentials = OperatorCredentials(token=directory.operator_token, password=directory.operator_password)
    credentials.open()

    def place(request: web.Request) -> str:
        return place_of(client_ip(request, proxies))

    visits = Visits(
        place=place,
        is_https=partial(is_https, trusted_proxies=proxies),
        address=partial(requested_address, settings=config.server),
    )
    return Guard(credentials, visits, name=run_id[:8])
