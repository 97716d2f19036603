from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import web

from echo_node.host.address import HubAddress
from echo_node.net.books import HubBooks
from echo_shared.errors import ConnectError, EchoError, RefusedError, RemoteProtocolError
from echo_shared.records.contribution import sign
from echo_shared.signing.identity import Identity
from echo_shared.wire.messages import Receipt, Receipts, ReceiptState, RefusalCode, Standby, Team
from tests.echo_shared.records.test_contribution import contribution

ME = Identity.generate()


def books(hub: Any, *, url: str = "", key: bytes = b"", me: Identity = ME) -> HubBooks:
    address = HubAddress.parse(url or hub.url, insecure=False)
    return HubBooks(address, me=me, hub_key=key or hub.me.public_key, invite_token=None)


async def test_receipts_are_reported_by_id_and_the_node_does_not_connect(bare_hub: Any) -> None:
    bare_hub.books["1-0"] = Receipt(rollout_id="1-0", state=ReceiptState.TRAINED)
    found = await asyncio.to_thread(books(bare_hub).receipts, ["1-0", "1-1"])
    assert [(name, found[name].state) for name in ("1-0", "1-1")] == [("1-0", "trained"), ("1-1", "dropped")]
    assert await asyncio.to_thread(books(bare_hub).receipts, []) == {}
    assert bare_hub.handshakes == 0


async def test_a_certificate_is_taken_of_this_node_and_hub_alone(bare_hub: Any) -> None:
    mine = {"hub_key": bare_hub.me.public_key.hex(), "node_key": ME.public_key.hex(), "node_id": ME.node_id}
    said = contribution(**mine)
    bare_hub.certificate = sign(said, bare_hub.me)
    document, found = await asyncio.to_thread(books(bare_hub).certificate)
    assert (document, found) == (bare_hub.certificate, said)
    another = Identity.generate()
    for other, signer in (
        (contribution(**{**mine, "node_key": another.public_key.hex(), "node_id": another.node_id}), bare_hub.me),
        (contribution(**{**mine, "hub_key": another.public_key.hex()}), another),
    ):
        bare_hub.certificate = sign(other, signer)
        with pytest.raises(RemoteProtocolError, match="of another node or hub"):
            await asyncio.to_thread(books(bare_hub).certificate)
    changed = json.loads(bare_hub.certificate)
    changed["certificate"]["trained_tokens"] += 1
    bare_hub.certificate = json.dumps(changed).encode()
    with pytest.raises(RemoteProtocolError, match="signature is wrong"):
        await asyncio.to_thread(books(bare_hub).certificate)


async def test_an_unpinned_hub_gets_no_request(bare_hub: Any) -> None:
    other = Identity.generate()
    with pytest.raises(RefusedError, match="differs from the one that this node has stored") as caught:
        await asyncio.to_thread(books(bare_hub, key=other.public_key).receipts, ["1-0"])
    assert caught.value.code == "hub_key_changed"
    bare_hub.forges_signature = True
    with pytest.raises(RemoteProtocolError, match="could not prove"):
        await asyncio.to_thread(books(bare_hub).receipts, ["1-0"])


async def test_a_refusal_is_the_hub_s_word(bare_hub: Any) -> None:
    bare_hub.refusal = RefusedError("Banned.", do="Ask.", code=RefusalCode.BANNED)
    with pytest.raises(RefusedError, match=r"The hub says: Banned\.") as caught:
        await asyncio.to_thread(books(bare_hub).receipts, ["1-0"])
    assert (caught.value.code, caught.value.do) == (RefusalCode.BANNED, "Ask.")


async def test_a_team_is_the_hub_s_answer(bare_hub: Any) -> None:
    bare_hub.books_answer = Team(name="Herons", members=2)
    assert await asyncio.to_thread(books(bare_hub).team, "join", "Herons") == Team(name="Herons", members=2)
    bare_hub.books_answer = Standby(reason=None)
    with pytest.raises(RemoteProtocolError, match="answer is not a team"):
        await asyncio.to_thread(books(bare_hub).team, "show")


@pytest.mark.parametrize(
    "answer", [Standby(reason=None), Receipts(receipts=(Receipt(rollout_id="2-0", state=ReceiptState.SCORED),))]
)
async def test_a_mismatched_answer_is_a_protocol_error(bare_hub: Any, answer: Any) -> None:
    bare_hub.books_answer = answer
    with pytest.raises(RemoteProtocolError):
        await asyncio.to_thread(books(bare_hub).receipts, ["1-0"])


@pytest.mark.parametrize(
    ("status", "error", "do"), [(404, ConnectError, "older than this node"), (503, ConnectError, "Try again later")]
)
async def test_a_server_without_these_records_is_recognized(
    bare_hub: Any, status: int, error: type[EchoError], do: str
) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(status=status)

    async with serving(answer) as url:
        with pytest.raises(error, match="does not answer queries") as caught:
            await asyncio.to_thread(books(bare_hub, url=url).receipts, ["1-0"])
    assert do in (caught.value.do or "") and asked == ["/node/receipts"]


async def test_credentials_go_to_no_other_place(bare_hub: Any) -> None:
    seen: list[str] = []

    async def elsewhere(request: web.Request) -> web.Response:
        seen.append(request.headers.get("Authorization", ""))
        return web.Response()

    async with serving(elsewhere) as other:

        async def moved(_: web.Request) -> web.Response:
            return web.Response(status=307, headers={"Location": f"{other}/node/certificate"})

        async with serving(moved) as url:
            with pytest.raises(ConnectError, match="does not answer queries"):
                await asyncio.to_thread(books(bare_hub, url=url).certificate)
    assert seen == []


async def test_an_unreachable_hub_is_reported(bare_hub: Any) -> None:
    url = bare_hub.url
    await bare_hub.close()
    with pytest.raises(ConnectError, match="cannot be reached"):
        await asyncio.to_thread(books(bare_hub, url=url).receipts, ["1-0"])


class serving:
    def __init__(self, handler: Any) -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handler)
        self._runner = web.AppRunner(application, access_log=None)

    async def __aenter__(self) -> str:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
