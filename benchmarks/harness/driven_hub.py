"""A hub made of the real modules (websocket, session, web seed, swarm), which sends only what its caller tells it to.

A subclass in `tests/driven_hub.py` also breaks the protocol.
"""

from __future__ import annotations

import asyncio
import secrets
import shutil
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from aiohttp import WSMsgType, web

from echo_shared import delta
from echo_shared.artefacts import sealing
from echo_shared.artefacts.hashed_files import describe_files
from echo_shared.artefacts.manifest import PAYLOAD_NAME, SEALED_SUFFIX, Manifest, artefact_name, sign_offer
from echo_shared.signing.identity import Identity
from echo_shared.swarm import Swarm, SwarmSettings, make_torrent, open_swarm
from echo_shared.wire.credentials import (
    Credentials,
    challenge_header,
)
from echo_shared.wire.messages import (
    ArtefactOffer,
    FromHub,
    FromNode,
    Lease,
    Receipt,
    Receipts,
    ReceiptState,
    Rollout,
    RunKey,
    Way,
    Welcome,
)
from echo_shared.wire.sessions import HubSession

PATIENCE_S = 60.0
M = TypeVar("M")


class DrivenHub:
    """Serves one run on loopback, and keeps every message of its nodes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "published"
        self.carriers = directory / "carriers"
        self.run_keys = (RunKey(key_id=1, key=sealing.new_key()),)
        """Keys of the run; new payloads are encrypted with the last one."""
        self.me = Identity.generate()
        self.run = "1"
        self.port = 0
        self.heartbeat_s = 0.2
        self.said: list[FromNode] = []
        self.session: HubSession | None = None
        self.handshakes = 0
        self.closed = 0
        self.offers: dict[int | None, ArtefactOffer] = {}
        self.gguf: ArtefactOffer | None = None
        """Offer of the base model as a GGUF file, which each Welcome contains; None: the hub offers no such file."""
        self.newest = 0
        self._news = asyncio.Condition()
        self._socket: web.WebSocketResponse | None = None
        self._runner: web.AppRunner | None = None
        self._swarm: Swarm | None = None

    @property
    def run_id(self) -> str:
        return f"{self.me.node_id}-{self.run}"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def open(self) -> None:
        if self._swarm is None:
            self._swarm = await open_swarm(SwarmSettings(listen_host="127.0.0.1"))
        app = web.Application()
        app.add_routes(self.routes())
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/node", self._serve),
            web.get("/announce/{passkey}", self._announce),
            web.get("/artefacts/{path:.+}", self._file),
        ]

    async def close(self) -> None:
        """Stop listening and close all connections. `open` listens at the same port again."""
        if self._socket is not None:
            await self._socket.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def end(self) -> None:
        await self.close()
        if self._swarm is not None:
            await self._swarm.close()

    async def offer(
        self,
        version: int | None,
        directory: Path,
        *,
        parent: int | None = None,
        way: Way = Way.SWARM,
        source: str | None = None,
        gguf: bool = False,
    ) -> ArtefactOffer:
        """Encrypt, sign and serve `directory`: as a delta if there is a `parent`, as the base model's GGUF file if
        `gguf` is True. Return the offer.
        """
        form: Literal["files", "gguf"] = "gguf" if gguf else "files"
        assert self._swarm is not None
        manifest = Manifest(
            kind="base" if version is None else "policy",
            run_id=self.run_id,
            name=directory.name if version is not None else self.published(None).name,
            policy_version=version or 0,
            carrier=form if version is None else "keyframe" if parent is None else "delta",
            delta_parent=parent,
            key_id=self.run_keys[-1].key_id,
            info_hash="0" * 40,
            files=describe_files(directory),
            source=source,
        )
        place = self.carriers / str(len(list(self.carriers.glob("*"))))
        carrier = place / manifest.carrier_name
        self.seal(manifest, directory, carrier)
        torrent = make_torrent(carrier)
        await self._swarm.seed(torrent.torrent, carrier)
        offer = sign_offer(
            manifest.model_copy(update={"info_hash": torrent.info_hash.hex()}),
            hub=self.me,
            torrent=torrent.torrent,
            web_seed_path=f"/artefacts/{place.name}/",
        )
        peers = (("127.0.0.1", self._swarm.port),)
        return offer.model_copy(update={"way": way, "delta_parent": parent, "peers": peers})

    def seal(self, manifest: Manifest, directory: Path, carrier: Path) -> None:
        key = self.run_keys[-1].key
        if manifest.in_files:
            for file in manifest.files:
                sealing.seal(directory / file.path, carrier / f"{file.path}{SEALED_SUFFIX}", key)
            return
        payload = self.carriers.parent / "payload"
        parent = None if manifest.delta_parent is None else self.published(manifest.delta_parent)
        delta.encode(directory, payload, parent=parent)
        sealing.seal(payload, carrier / PAYLOAD_NAME, key)

    def published(self, version: int | None) -> Path:
        return self.directory / artefact_name("base" if version is None else "policy", self.run_id, version or 0)

    async def publish_base(self, base: Path) -> None:
        directory = self.published(None)
        shutil.copytree(base, directory)
        self.offers[None] = await self.offer(None, directory)

    def welcome(self) -> Welcome:
        return Welcome(
            run_id=self.run_id,
            run_name="test run",
            node_id="node",
            base=self.offers[None],
            gguf=self.gguf,
            policy=self.offers.get(self.newest),
            policy_version=self.newest,
            tracker_path="/announce/key",
            heartbeat_s=self.heartbeat_s,
            run_keys=self.run_keys,
        )

    async def send(self, message: FromHub) -> None:
        assert self.session is not None
        await self.send_bytes(self.session.send(message))

    async def send_bytes(self, frame: bytes) -> None:
        assert self._socket is not None
        await self._socket.send_bytes(frame)

    async def lease(
        self, lease_id: int, *, version: int, count: int = 4, deadline_s: float = 60.0, **fields: Any
    ) -> Lease:
        lease = make_lease(lease_id, version=version, count=count, deadline_s=deadline_s).model_copy(update=fields)
        await self.send(lease)
        return lease

    async def until(self, condition: Any) -> None:
        """Wait until the condition is true. It is checked when a node sends a message, joins or leaves."""
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(condition)

    def all(self, kind: type[M]) -> list[M]:
        return [message for message in self.said if isinstance(message, kind)]

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def _announce(self, request: web.Request) -> web.Response:
        return web.Response(body=b"d8:intervali1800e5:peers0:e")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        return web.FileResponse(self.carriers / request.match_info["path"])

    async def _met(self, request: web.Request) -> HubSession | web.Response:
        """Check the node's credentials. Return the session if the node has proved its identity, else the HTTP
        answer.
        """
        credentials = Credentials.of_header(request.headers["Authorization"])
        assert credentials is not None
        session = HubSession(me=self.me, software_version="test", nonce=credentials.nonce or secrets.token_bytes(32))
        hello = session.receive(credentials.hello)
        if not credentials.proof:
            self.said.append(hello)
            await self._notify()
            challenge = self._challenge(session)
            return web.Response(status=401, headers={"WWW-Authenticate": challenge_header(challenge)})
        session.receive(credentials.proof)
        return session

    def _challenge(self, session: HubSession) -> bytes:
        return session.challenge()

    def _welcome_frame(self, session: HubSession) -> bytes:
        return session.welcome(self.welcome())

    async def _hear(self, message: FromNode) -> None:
        self.said.append(message)
        if isinstance(message, Rollout):
            await self.acknowledge(message.rollout_id)

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        session = await self._met(request)
        if isinstance(session, web.Response):
            return session
        assert session.proof is not None
        socket = web.WebSocketResponse(max_msg_size=2**24)
        await socket.prepare(request)
        self._socket, self.session = socket, session
        self.said.append(session.proof)
        self.handshakes += 1
        await socket.send_bytes(self._welcome_frame(session))
        await self._notify()
        async for frame in socket:
            if frame.type is not WSMsgType.BINARY:
                break
            await self._hear(session.receive(frame.data))
            await self._notify()
        self.closed += 1
        await self._notify()
        return socket

    async def acknowledge(self, *rollout_ids: str, state: ReceiptState = ReceiptState.RECEIVED) -> None:
        await self.send(Receipts(receipts=tuple(Receipt(rollout_id=name, state=state) for name in rollout_ids)))


def make_lease(lease_id: int, *, version: int, count: int = 4, deadline_s: float = 60.0) -> Lease:
    return Lease(
        lease_id=lease_id,
        group_id=lease_id * 10,
        indices=tuple(range(count)),
        prompt_ids=np.array([3, 5, 7], np.int32),
        seed=lease_id,
        policy_version=version,
        temperature=1.0,
        max_tokens=6,
        stop_ids=(1,),
        deadline_s=deadline_s,
    )
