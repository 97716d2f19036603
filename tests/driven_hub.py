"""A hub whose messages a test chooses one by one, so that the hub can violate the protocol; and a tiny random model for
it.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
from aiohttp import web
from safetensors.numpy import save_file

from benchmarks.harness import driven_hub
from benchmarks.harness.driven_hub import make_lease
from echo_shared.errors import RefusedError
from echo_shared.swarm import read_torrent
from echo_shared.wire.codec import decode_from_node, encode
from echo_shared.wire.credentials import BOOKS_CERTIFICATE, BOOKS_FLEET, BOOKS_RECEIPTS, BOOKS_TEAM, REFUSED_TYPE
from echo_shared.wire.messages import (
    ArtefactOffer,
    DropReason,
    Fleet,
    FleetWanted,
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
    Team,
    TeamWanted,
    Way,
)
from echo_shared.wire.sessions import HubSession

__all__ = ["DrivenHub", "make_lease", "write_adapter", "write_base"]

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, FFN, VOCAB = 32, 2, 4, 2, 8, 64, 48


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


class DrivenHub(driven_hub.DrivenHub):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.forges_signature = False
        """True to sign the Challenge with a wrong key."""
        self.refusal: RefusedError | None = None
        """Refusal that every node gets in place of a Welcome."""
        self.welcome_changes: dict[str, Any] = {}
        """Fields of the Welcome to replace, without validation."""
        self.never_ends = False
        """True to answer each request for a file with a file that never ends."""
        self.num_served = 0
        """Number of bytes of never-ending files that the hub has sent."""
        self.acknowledges = True
        self.books: dict[str, Receipt] = {}
        """Receipts by rollout id, with which the hub answers queries by HTTP. If a queried rollout has no entry, its
        receipt says that the rollout was dropped as invalid.
        """
        self.books_answer: FromHub | None = None
        """Message with which the hub answers such queries in place of the receipts."""
        self.certificate = b""
        self.trackers_asked: list[str] = []

    def routes(self) -> list[web.RouteDef]:
        return [
            *super().routes(),
            web.post(BOOKS_RECEIPTS, self._tell_receipts),
            web.post(BOOKS_TEAM, self._tell_team),
            web.post(BOOKS_FLEET, self._tell_fleet),
            web.get(BOOKS_CERTIFICATE, self._tell_certificate),
        ]

    async def publish_base(self, base: Path | None = None) -> None:
        if base is None:
            base = self.carriers.parent / "tiny_base"
            if not base.exists():
                write_base(base)
        await super().publish_base(base)

    async def publish(
        self, version: int, *, announce: bool = True, parent: int | None = None, way: Way = Way.SWARM
    ) -> None:
        directory = self.published(version)
        write_adapter(directory, version)
        self.offers[version] = await self.offer(version, directory, parent=parent, way=way)
        self.newest = version
        if announce:
            await self.send(PolicyPublished(policy_version=version, offer=self.offers[version]))

    def pieces(self, offer: ArtefactOffer, *, hand_on: bytes = b"") -> list[Piece]:
        """Return all pieces of the offered files, as the hub would push them to the node."""
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

    async def send_raw(self, message: FromHub, **changes: Any) -> None:
        """Send the message with some values replaced and not validated."""
        assert self.session is not None
        await self.send_bytes(msgpack.packb({**msgpack.unpackb(self.session.send(message)), **changes}))

    def write_raw(self, data: bytes) -> None:
        """Write bytes to the TCP connection, outside any websocket frame."""
        assert self._socket is not None and self._socket._req is not None
        transport = self._socket._req.transport
        assert transport is not None
        transport.write(data)

    def stop_reading(self) -> None:
        """Read nothing more from the connection, and keep it open."""
        assert self._socket is not None and self._socket._req is not None
        transport = self._socket._req.transport
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()

    async def refuse(self, code: str, what: str) -> None:
        assert self._socket is not None and self.session is not None
        await self._socket.send_bytes(self.session.refuse(code, what))

    def rollouts(self, lease: Lease) -> dict[int, Rollout]:
        return {r.index: r for r in self.all(Rollout) if r.lease_id == lease.lease_id}

    async def finished(self, lease: Lease) -> dict[int, Rollout]:
        await self.until(lambda: set(self.rollouts(lease)) == set(lease.indices))
        return self.rollouts(lease)

    async def _announce(self, request: web.Request) -> web.Response:
        self.trackers_asked.append(request.match_info["passkey"])
        return await super()._announce(request)

    async def _file(self, request: web.Request) -> web.StreamResponse:
        if not self.never_ends:
            return await super()._file(request)
        answer = web.StreamResponse(status=206 if "Range" in request.headers else 200)
        await answer.prepare(request)
        with suppress(ConnectionError):
            while True:
                await answer.write(bytes(2**16))
                self.num_served += 2**16
        return answer

    def _challenge(self, session: HubSession) -> bytes:
        challenge = super()._challenge(session)
        if self.forges_signature:
            challenge = msgpack.packb({**msgpack.unpackb(challenge), "signature": bytes(64)})
        return challenge

    async def _met(self, request: web.Request) -> HubSession | web.Response:
        met = await super()._met(request)
        if self.refusal is None or isinstance(met, web.Response):
            return met
        self.closed += 1
        await self._notify()
        refused = met.refuse(self.refusal.code, self.refusal.what, self.refusal.do or "")
        return web.Response(status=403, body=refused, content_type=REFUSED_TYPE)

    def _welcome_frame(self, session: HubSession) -> bytes:
        welcome = msgpack.unpackb(super()._welcome_frame(session))
        changed: bytes = msgpack.packb({**welcome, **self.welcome_changes}, unicode_errors="surrogatepass")
        return changed

    async def _hear(self, message: FromNode) -> None:
        if self.acknowledges:
            await super()._hear(message)
        else:
            self.said.append(message)

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

    async def _tell_fleet(self, request: web.Request) -> web.Response:
        met = await self._met(request)
        if isinstance(met, web.Response):
            return met
        wanted = decode_from_node(await request.read())
        assert isinstance(wanted, FleetWanted)
        return web.Response(body=encode(self.books_answer or Fleet()), content_type=REFUSED_TYPE)

    async def _tell_certificate(self, request: web.Request) -> web.Response:
        met = await self._met(request)
        if isinstance(met, web.Response):
            return met
        return web.Response(body=self.certificate, content_type="application/json")
