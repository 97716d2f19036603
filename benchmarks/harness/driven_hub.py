"""A hub of real parts (websocket, session, web seed, swarm) that its caller drives, and a tiny random model.

The hub sends any message that its caller wants, invalid ones included. Tests and benchmarks drive nodes with it.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgpack
import numpy as np
from aiohttp import WSMsgType, web
from safetensors.numpy import save_file

from echo_shared import delta, sealing
from echo_shared.artefacts import PAYLOAD_NAME, SEALED_SUFFIX, Manifest, artefact_name, sign_offer
from echo_shared.codec import decode_from_node, encode
from echo_shared.credentials import (
    BOOKS_CERTIFICATE,
    BOOKS_RECEIPTS,
    BOOKS_TEAM,
    REFUSED_TYPE,
    Credentials,
    challenge_header,
)
from echo_shared.errors import RefusedError
from echo_shared.hashed_files import describe_files
from echo_shared.identity import Identity
from echo_shared.messages import (
    ArtefactOffer,
    DropReason,
    FromHub,
    FromNode,
    Lease,
    Piece,
    PolicyPublished,
    Receipt,
    Receipts,
    ReceiptState,
    ReceiptsWanted,
    Rollout,
    RunKey,
    Team,
    TeamWanted,
    Way,
    Welcome,
)
from echo_shared.sessions import HubSession
from echo_shared.swarm import Swarm, SwarmSettings, make_torrent, open_swarm, read_torrent

PATIENCE_S = 60.0
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 32, 2, 4, 2, 8, 64, 48
M = TypeVar("M")


def write_base(directory: Path) -> None:
    """Write a random Qwen3 model in Hugging Face layout."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(7)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "max_position_embeddings": 128,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "tie_word_embeddings": True,
        "dtype": "float32",
        "vocab_size": VOCAB,
        "eos_token_id": 1,
    }
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {"model.embed_tokens.weight": rng.normal(0, 0.3, (VOCAB, HIDDEN)), "model.norm.weight": np.ones(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        tensors[prefix + "input_layernorm.weight"] = np.ones(HIDDEN)
        tensors[prefix + "post_attention_layernorm.weight"] = np.ones(HIDDEN)
        tensors[prefix + "self_attn.q_norm.weight"] = np.ones(HEAD_DIM)
        tensors[prefix + "self_attn.k_norm.weight"] = np.ones(HEAD_DIM)
        for name, (rows, columns) in linear_shapes().items():
            tensors[f"{prefix}{name}.weight"] = rng.normal(0, 0.15, (rows, columns))
    save_file(
        {name: np.ascontiguousarray(t, np.float32) for name, t in tensors.items()}, directory / "model.safetensors"
    )


def linear_shapes() -> dict[str, tuple[int, int]]:
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    return {
        "self_attn.q_proj": (q, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q),
        "mlp.gate_proj": (FFN, HIDDEN),
        "mlp.up_proj": (FFN, HIDDEN),
        "mlp.down_proj": (HIDDEN, FFN),
    }


def write_adapter(directory: Path, seed: int) -> None:
    """Write a random LoRA adapter of rank 2 in PEFT layout."""
    directory.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 2,
        "lora_alpha": 4,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(name.partition(".")[2] for name in linear_shapes()),
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors: dict[str, Any] = {}
    for layer in range(LAYERS):
        for name, (rows, columns) in linear_shapes().items():
            path = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{path}.lora_A.weight"] = rng.normal(0, 0.3, (2, columns)).astype(np.float32)
            tensors[f"{path}.lora_B.weight"] = rng.normal(0, 0.3, (rows, 2)).astype(np.float32)
    save_file(tensors, directory / "adapter_model.safetensors")


class DrivenHub:
    """Serves one run on loopback, and keeps every message of its nodes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory / "published"
        self.carriers = directory / "carriers"
        """Directory with a subdirectory for each offer."""
        self.run_keys = (RunKey(key_id=1, key=sealing.new_key()),)
        """Run keys; the last one seals."""
        self.me = Identity.generate()
        self.run = "1"
        self.port = 0
        self.heartbeat_s = 0.2
        self.forges_signature = False
        """True to sign the Challenge without the key."""
        self.refusal: RefusedError | None = None
        """Sent to every node in place of a Welcome."""
        self.welcome_changes: dict[str, Any] = {}
        """Values that replace those of the Welcome, unchecked."""
        self.never_ends = False
        """True to serve files by HTTP that never end."""
        self.num_served = 0
        """Bytes of files that never end."""
        self.acknowledges = True
        self.books: dict[str, Receipt] = {}
        """Receipts for nodes that ask by HTTP. Other rollouts are reported as invalid."""
        self.books_answer: FromHub | None = None
        """Answer that replaces the receipts."""
        self.certificate = b""
        self.trackers_asked: list[str] = []
        self.said: list[FromNode] = []
        self.session: HubSession | None = None
        self.handshakes = 0
        self.closed = 0
        self.offers: dict[int | None, ArtefactOffer] = {}
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
        app.add_routes(
            [
                web.get("/node", self._serve),
                web.post(BOOKS_RECEIPTS, self._tell_receipts),
                web.post(BOOKS_TEAM, self._tell_team),
                web.get(BOOKS_CERTIFICATE, self._tell_certificate),
                web.get("/announce/{passkey}", self._announce),
                web.get("/artefacts/{path:.+}", self._file),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Stop listening and hang up. `open` listens at the same port again."""
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
    ) -> ArtefactOffer:
        """Seal, sign and seed `directory`, as a delta if there is a `parent`."""
        assert self._swarm is not None
        manifest = Manifest(
            kind="base" if version is None else "policy",
            run_id=self.run_id,
            name=directory.name,
            policy_version=version or 0,
            carrier="files" if version is None else "keyframe" if parent is None else "delta",
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
        if manifest.carrier == "files":
            for file in manifest.files:
                sealing.seal(directory / file.path, carrier / f"{file.path}{SEALED_SUFFIX}", key)
            return
        payload = self.carriers.parent / "payload"
        parent = None if manifest.delta_parent is None else self.published(manifest.delta_parent)
        delta.encode(directory, payload, parent=parent)
        sealing.seal(payload, carrier / PAYLOAD_NAME, key)

    def published(self, version: int | None) -> Path:
        return self.directory / artefact_name("base" if version is None else "policy", self.run_id, version or 0)

    def pieces(self, offer: ArtefactOffer, *, hand_on: bytes = b"") -> list[Piece]:
        """Make the pieces of a push of this offer."""
        layout = read_torrent(offer.torrent)
        carrier = self.carriers / offer.web_seed_path.split("/")[2] / layout.name
        data = b"".join((carrier / path).read_bytes() for path, _ in layout.files)
        return [
            Piece(
                info_hash=layout.info_hash,
                index=index,
                data=data[index * layout.piece_bytes : (index + 1) * layout.piece_bytes],
                hand_on=hand_on,
            )
            for index in range(len(layout.piece_hashes))
        ]

    async def publish_base(self, base: Path | None = None) -> None:
        """Publish a base model, by default a tiny random one."""
        directory = self.published(None)
        if base is None:
            write_base(directory)
        else:
            shutil.copytree(base, directory)
        self.offers[None] = await self.offer(None, directory)

    async def publish(
        self, version: int, *, announce: bool = True, parent: int | None = None, way: Way = Way.SWARM
    ) -> None:
        directory = self.published(version)
        write_adapter(directory, version)
        self.offers[version] = await self.offer(version, directory, parent=parent, way=way)
        self.newest = version
        if announce:
            await self.send(PolicyPublished(policy_version=version, offer=self.offers[version]))

    def welcome(self) -> Welcome:
        return Welcome(
            run_id=self.run_id,
            run_name="test run",
            node_id="node",
            base=self.offers[None],
            policy=self.offers.get(self.newest),
            policy_version=self.newest,
            tracker_path="/announce/key",
            heartbeat_s=self.heartbeat_s,
            run_keys=self.run_keys,
        )

    async def send(self, message: FromHub) -> None:
        assert self.session is not None
        await self.send_bytes(self.session.send(message))

    async def send_raw(self, message: FromHub, **changes: Any) -> None:
        """Send the message with other values, unchecked."""
        assert self.session is not None
        await self.send_bytes(msgpack.packb({**msgpack.unpackb(self.session.send(message)), **changes}))

    async def send_bytes(self, frame: bytes) -> None:
        assert self._socket is not None
        await self._socket.send_bytes(frame)

    def write_raw(self, data: bytes) -> None:
        """Write bytes to the connection, without a websocket frame."""
        assert self._socket is not None and self._socket._req is not None
        transport = self._socket._req.transport
        assert transport is not None
        transport.write(data)

    async def refuse(self, code: str, what: str) -> None:
        """End the open session with a refusal."""
        assert self._socket is not None and self.session is not None
        await self._socket.send_bytes(self.session.refuse(code, what))

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

    def rollouts(self, lease: Lease) -> dict[int, Rollout]:
        return {r.index: r for r in self.all(Rollout) if r.lease_id == lease.lease_id}

    async def finished(self, lease: Lease) -> dict[int, Rollout]:
        await self.until(lambda: set(self.rollouts(lease)) == set(lease.indices))
        return self.rollouts(lease)

    async def _notify(self) -> None:
        async with self._news:
            self._news.notify_all()

    async def _announce(self, request: web.Request) -> web.Response:
        self.trackers_asked.append(request.match_info["passkey"])
        return web.Response(body=b"d8:intervali1800e5:peers0:e")

    async def _file(self, request: web.Request) -> web.StreamResponse:
        if not self.never_ends:
            return web.FileResponse(self.carriers / request.match_info["path"])
        answer = web.StreamResponse(status=206 if "Range" in request.headers else 200)
        await answer.prepare(request)
        with suppress(ConnectionError):
            while True:
                await answer.write(bytes(2**16))
                self.num_served += 2**16
        return answer

    async def _met(self, request: web.Request) -> HubSession | web.Response:
        """Check credentials. Returns the session of a proven node, or the answer for any other client."""
        credentials = Credentials.of_header(request.headers["Authorization"])
        assert credentials is not None
        session = HubSession(me=self.me, software_version="test", nonce=credentials.nonce or secrets.token_bytes(32))
        hello = session.receive(credentials.hello)
        if not credentials.proof:
            self.said.append(hello)
            await self._notify()
            challenge = session.challenge()
            if self.forges_signature:
                challenge = msgpack.packb({**msgpack.unpackb(challenge), "signature": bytes(64)})
            return web.Response(status=401, headers={"WWW-Authenticate": challenge_header(challenge)})
        session.receive(credentials.proof)
        if self.refusal is not None:
            self.closed += 1
            await self._notify()
            refused = session.refuse(self.refusal.code, self.refusal.what, self.refusal.do or "")
            return web.Response(status=403, body=refused, content_type=REFUSED_TYPE)
        return session

    async def _tell_receipts(self, request: web.Request) -> web.Response:
        met = await self._met(request)
        if isinstance(met, web.Response):
            return met
        wanted = decode_from_node(await request.read())
        assert isinstance(wanted, ReceiptsWanted)
        found = [
            self.books.get(one) or Receipt(rollout_id=one, state=ReceiptState.DROPPED, drop_reason=DropReason.INVALID)
            for one in wanted.rollout_ids
        ]
        body = encode(self.books_answer or Receipts(receipts=tuple(found)))
        return web.Response(body=body, content_type=REFUSED_TYPE)

    async def _tell_team(self, request: web.Request) -> web.Response:
        met = await self._met(request)
        if isinstance(met, web.Response):
            return met
        wanted = decode_from_node(await request.read())
        assert isinstance(wanted, TeamWanted)
        return web.Response(body=encode(self.books_answer or Team()), content_type=REFUSED_TYPE)

    async def _tell_certificate(self, request: web.Request) -> web.Response:
        met = await self._met(request)
        if isinstance(met, web.Response):
            return met
        return web.Response(body=self.certificate, content_type="application/json")

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
        welcome = msgpack.unpackb(session.welcome(self.welcome()))
        await socket.send_bytes(msgpack.packb({**welcome, **self.welcome_changes}, unicode_errors="surrogatepass"))
        await self._notify()
        async for frame in socket:
            if frame.type is not WSMsgType.BINARY:
                break
            message = session.receive(frame.data)
            self.said.append(message)
            if isinstance(message, Rollout) and self.acknowledges:
                await self.acknowledge(message.rollout_id)
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
