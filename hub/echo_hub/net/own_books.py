"""HTTP routes through which a node reads its own records: receipts of rollouts, its certificate, team and fleet.

    POST /node/receipts      body ReceiptsWanted  ──►  Receipts
    GET  /node/certificate                        ──►  a certificate of contribution, JSON
    POST /node/team          body TeamWanted      ──►  Team; also creates, joins and leaves teams
    POST /node/fleet         body FleetWanted     ──►  Fleet; also passes commands on to nodes of the same owner

A node authenticates as for the websocket (`door`): its first request is answered with a challenge, the second carries
the proof. A node therefore sees only its own records. An open websocket is not required.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, Protocol

from aiohttp import hdrs, web

from echo_hub.net.address_rate import AddressRate
from echo_hub.net.door import TurnedAway
from echo_hub.net.gateway import Gateway, Inbox
from echo_shared.errors import RefusedError, RemoteProtocolError
from echo_shared.wire.codec import decode_from_node, encode
from echo_shared.wire.credentials import (
    BOOKS_CERTIFICATE,
    BOOKS_FLEET,
    BOOKS_RECEIPTS,
    BOOKS_TEAM,
    MOST_RECEIPTS,
    REFUSED_TYPE,
)
from echo_shared.wire.messages import (
    Fleet,
    FleetWanted,
    FromNode,
    Receipt,
    Receipts,
    ReceiptsWanted,
    RefusalCode,
    Team,
    TeamWanted,
)

IN_ALL_PER_S: Final = 20.0
OF_ONE_PER_S: Final = 1.0
BODY_S: Final = 10.0
"""Longest time for a request body (a few kilobytes) to arrive, in seconds."""
BODY_BYTES: Final = 64 * MOST_RECEIPTS

Answer = Callable[[web.Request, str], Awaitable[web.Response]]

_NO_STORE: Final = {hdrs.CACHE_CONTROL: "no-store"}


class Records(Protocol):
    """Reads and changes the records of single nodes. Implemented by `echo_hub.intake.node_records`."""

    async def receipts(self, node_id: str, rollout_ids: Sequence[str]) -> Sequence[Receipt]:
        """Return the receipts of these rollouts of the node."""

    async def certificate(self, node_id: str) -> bytes | None:
        """Return the node's signed certificate; None if the node has never joined."""

    async def change_team(self, node_id: str, wanted: TeamWanted) -> Team:
        """Create, join or leave a team for the node, and return its team. Raises RefusedError."""

    async def fleet(self, node_id: str, wanted: FleetWanted) -> Fleet:
        """Pass on the owner's command, if any, and return the owner's nodes. Raises RefusedError."""


class OwnBooks:
    """The routes of a node's own records."""

    def __init__(self, gateway: Gateway, records: Records) -> None:
        self._gateway = gateway
        self._records = records
        self._rate = AddressRate(in_all=IN_ALL_PER_S, of_one=OF_ONE_PER_S, now=time.monotonic())

    def routes(self, inbox: Inbox) -> list[web.AbstractRouteDef]:
        """Return the routes. Only a node that `inbox` lets join gets an answer."""

        def guarded(answer: Answer) -> Callable[[web.Request], Awaitable[web.Response]]:
            async def handle(request: web.Request) -> web.Response:
                try:
                    node_id = await self._gateway.identify(request, inbox)
                    if not self._rate.take(node_id, now=time.monotonic()):
                        raise _too_fast()
                    return await answer(request, node_id)
                except TurnedAway as turned:
                    return turned.response
                except (RefusedError, RemoteProtocolError) as error:
                    return self._gateway.refuse(error)

            return handle

        return [
            web.post(BOOKS_RECEIPTS, guarded(self._receipts)),
            web.post(BOOKS_TEAM, guarded(self._team)),
            web.post(BOOKS_FLEET, guarded(self._fleet)),
            web.get(BOOKS_CERTIFICATE, guarded(self._certificate), allow_head=False),
        ]

    async def _receipts(self, request: web.Request, node_id: str) -> web.Response:
        wanted = await _wanted(request)
        if not isinstance(wanted, ReceiptsWanted):
            raise RemoteProtocolError("The body of a receipts request has the wrong message type.", got=wanted.type)
        if len(wanted.rollout_ids) > MOST_RECEIPTS:
            raise _too_much(f"{len(wanted.rollout_ids)} rollouts")
        found = await self._records.receipts(node_id, wanted.rollout_ids)
        return web.Response(body=encode(Receipts(receipts=tuple(found))), content_type=REFUSED_TYPE, headers=_NO_STORE)

    async def _team(self, request: web.Request, node_id: str) -> web.Response:
        wanted = await _wanted(request)
        if not isinstance(wanted, TeamWanted):
            raise RemoteProtocolError("The body of a team request has the wrong message type.", got=wanted.type)
        team = await self._records.change_team(node_id, wanted)
        return web.Response(body=encode(team), content_type=REFUSED_TYPE, headers=_NO_STORE)

    async def _fleet(self, request: web.Request, node_id: str) -> web.Response:
        wanted = await _wanted(request)
        if not isinstance(wanted, FleetWanted):
            raise RemoteProtocolError("The body of a fleet request has the wrong message type.", got=wanted.type)
        fleet = await self._records.fleet(node_id, wanted)
        return web.Response(body=encode(fleet), content_type=REFUSED_TYPE, headers=_NO_STORE)

    async def _certificate(self, request: web.Request, node_id: str) -> web.Response:
        document = await self._records.certificate(node_id)
        if document is None:
            raise RefusedError("This node has never joined this hub's run.", got=node_id, do="echo-node join URL")
        return web.Response(body=document, content_type="application/json", headers=_NO_STORE)


async def _wanted(request: web.Request) -> FromNode:
    """Read and decode the request body. Raises RemoteProtocolError."""
    if request.content_length is None or request.content_length > BODY_BYTES:
        raise _too_much(f"{request.content_length} bytes")
    try:
        async with asyncio.timeout(BODY_S):
            return decode_from_node(await request.read())
    except TimeoutError as error:
        raise RemoteProtocolError("A request body did not arrive in time.") from error


def _too_fast() -> RefusedError:
    return RefusedError("This node sends requests too often.", do="Wait a few seconds.", code=RefusalCode.TOO_SOON)


def _too_much(got: str) -> RemoteProtocolError:
    return RemoteProtocolError(
        "A node asks for too many receipts at once.", got=got, do=f"Ask for at most {MOST_RECEIPTS} at once."
    )
