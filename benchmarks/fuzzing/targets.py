"""Targets of the fuzzer: functions that read bytes from untrusted peers, with valid examples.

A target may raise the errors that its callers expect (`EchoError`). Other errors, hangs and excessive memory count as
findings. *Cheap* targets take microseconds; *dear* targets take longer, because they write files or decrypt.
"""

from __future__ import annotations

import io
import json
import math
import random
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from safetensors.numpy import save_file

from echo_hub.net import tracker
from echo_node.net.mesh_proof import node_of
from echo_shared import delta
from echo_shared.artefacts import sealing
from echo_shared.artefacts.manifest import Manifest, ManifestFile, open_offer, sign_offer
from echo_shared.delta.adapter import CONFIG_FILE, WEIGHTS_FILE, load_adapter
from echo_shared.delta.tensors import read_layout
from echo_shared.errors import EchoError
from echo_shared.signing.identity import Identity
from echo_shared.swarm import bencode
from echo_shared.swarm.torrent import make_torrent, read_torrent
from echo_shared.wire import codec
from echo_shared.wire.credentials import Credentials
from echo_shared.wire.messages import (
    FinishReason,
    FromHub,
    FromNode,
    Lease,
    LeasedPrefix,
    NodeStatus,
    PolicyPublished,
    Receipt,
    Receipts,
    ReceiptState,
    ReceiptsWanted,
    Rollout,
    RolloutPart,
    RolloutParts,
    TeamWanted,
    rollout_id,
)

Blind = Callable[[bytes, int], bytes]
"""A function that mutates bytes without regard to their format: (data, maximum size)."""

UNPACKED: Final = msgpack.UnpackException
_ODD: Final[tuple[Any, ...]] = (
    *(0, 1, -1, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**31), -(2**63)),
    *(0.0, -0.0, 0.5, 1e-300, 1e308, math.inf, -math.inf, math.nan),
    *(True, False, None, "", "x", "x" * 300, "\0", "\u202e", "<b>", "../../x", "\ud7ff", b"", b"\0", b"\xff" * 64),
    *([], {}, [[]], [[[[[[]]]]]], {"": {}}, {"type": "hello"}, [0] * 100, [{}] * 10),
)


def frame(data: bytes, most: int, seed: int, blind: Blind) -> bytes:
    return _changed(data, most, seed, blind, lambda raw: msgpack.unpackb(raw, strict_map_key=False), _packed)


def text(data: bytes, most: int, seed: int, blind: Blind) -> bytes:
    return _changed(data, most, seed, blind, json.loads, _written)


def _packed(tree: Any) -> bytes:
    packed: bytes = msgpack.packb(tree)
    return packed


def _written(tree: Any) -> bytes:
    return json.dumps(tree, default=repr).encode(errors="surrogatepass")


def _changed(
    data: bytes, most: int, seed: int, blind: Blind, read: Callable[[bytes], Any], write: Callable[[Any], bytes]
) -> bytes:
    chance = random.Random(seed)
    if chance.random() < 1 / 8:
        return blind(data, most)
    try:
        tree = read(data)
        for _ in range(chance.choice((1, 1, 1, 2, 4))):
            tree = _with_a_change(tree, chance, blind)
            changed = write(tree)
            if len(changed) > most:  # One change can multiply the message's size.
                return blind(data, most)
    except (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError, UNPACKED):
        return blind(data, most)
    return changed


def _with_a_change(tree: Any, chance: random.Random, blind: Blind) -> Any:
    """Return the tree with one value changed at a random place."""
    if isinstance(tree, dict) and tree and chance.random() < 0.9:
        key = chance.choice(list(tree))
        kind = chance.random()
        if kind < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        if kind < 0.2:
            return {**tree, chance.choice(("x", "type", key)): deepcopy(chance.choice(_ODD))}
        return {**tree, key: _with_a_change(tree[key], chance, blind)}
    if isinstance(tree, list) and tree and chance.random() < 0.8:
        place = chance.randrange(len(tree))
        if chance.random() < 0.2:
            return tree[:place] + tree[place : place + 1] * chance.choice((0, 2, 65)) + tree[place + 1 :]
        return [*tree[:place], _with_a_change(tree[place], chance, blind), *tree[place + 1 :]]
    if isinstance(tree, bytes) and chance.random() < 0.7:
        return blind(tree, len(tree) + 8)
    return deepcopy(chance.choice(_ODD))


CHEAP_RUNS: Final = 10_000_000
DEAR_RUNS: Final = 100_000
_KEY: Final = bytes(range(32))
_HUB: Final = Identity(Ed25519PrivateKey.from_private_bytes(_KEY))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A fuzzing target. If the bytes are invalid, `read` must raise EchoError and no other error."""

    read: Callable[[bytes], object]
    examples: Callable[[], Sequence[bytes]]
    runs: int = CHEAP_RUNS
    mutate: Callable[[bytes, int, int, Blind], bytes] | None = None
    most_bytes: int = 4_096


def run(target: Target, data: bytes) -> bool:
    """Read the bytes; return True if they are valid. An error is a finding."""
    try:
        target.read(data)
    except EchoError:
        return False
    return True


def _read_large(data: bytes) -> None:
    """Decode a message in both ways that the codec has, and compare the results: whole, as for small frames, and field
    by field, as for large ones. Only the second way skips unknown fields.
    """
    small, large = (_decoded(data, small_bytes) for small_bytes in (len(data), 0))
    if small is not None and small != large:
        raise AssertionError(f"read whole: {small!r}; by its fields: {large!r}")


def _decoded(data: bytes, small_bytes: int) -> bytes | None:
    """Decode a message and encode it again; return None if it is invalid."""
    before = codec.SMALL_BYTES
    vars(codec)["SMALL_BYTES"] = small_bytes
    try:
        return codec.encode(codec.decode_from_node(data))
    except EchoError:
        return None
    finally:
        vars(codec)["SMALL_BYTES"] = before


def _from_node() -> list[bytes]:
    ids, logprobs = np.arange(5, dtype=np.int32), np.full(5, -1, np.float32)
    part = RolloutPart(lease_id=3, index=1, start=0, policy_version=2, ids=ids, logprobs=logprobs)
    messages: list[FromNode] = [
        NodeStatus(activity="sampling", capacity=8, policy_version=3, tokens_per_s=9.5),
        RolloutParts(parts=(part,)),
        ReceiptsWanted(rollout_ids=(rollout_id(1, 2),)),
        TeamWanted(action="join", name="Herons"),
        Rollout(
            rollout_id=rollout_id(3, 1),
            lease_id=3,
            group_id=2,
            index=1,
            policy_version_start=2,
            policy_version_end=2,
            completion_ids=ids,
            behavior_logprobs=logprobs,
            finish_reason=FinishReason.STOP,
            sampling_s=0.5,
        ),
    ]
    return [codec.encode(message) for message in messages]


def _from_hub() -> list[bytes]:
    ids, logprobs = np.arange(5, dtype=np.int32), np.full(5, -1, np.float32)
    offer = sign_offer(_manifest(), hub=_HUB, torrent=b"d4:infod4:name1:aee", web_seed_path="/artefacts/x/")
    messages: list[FromHub] = [
        Receipts(receipts=(Receipt(rollout_id=rollout_id(1, 2), state=ReceiptState.TRAINED),)),
        PolicyPublished(policy_version=3, offer=offer),
        Lease(
            lease_id=3,
            group_id=2,
            indices=(0, 1),
            prompt_ids=ids,
            seed=2**63,
            policy_version=2,
            temperature=1.0,
            max_tokens=16,
            stop_ids=(1,),
            deadline_s=60.0,
            prefixes=(LeasedPrefix(index=1, ids=ids, logprobs=logprobs),),
        ),
    ]
    return [codec.encode(message) for message in messages]


@cache
def _manifest() -> Manifest:
    file = ManifestFile(path="adapter_model.safetensors", size_bytes=9, sha256="0" * 64)
    return Manifest(
        kind="policy",
        run_id="r",
        name="r-v000003",
        policy_version=3,
        carrier="keyframe",
        key_id=1,
        info_hash="0" * 40,
        files=(file,),
    )


def _read_manifest(data: bytes) -> None:
    offer = sign_offer(_manifest(), hub=_HUB, torrent=b"", web_seed_path="/x/")
    open_offer(offer.model_copy(update={"manifest": data, "signature": _HUB.sign(data)}), _HUB.public_key)


def _read_announce(data: bytes) -> None:
    path = "/announce/x?" + data.decode("latin-1")
    tracker.read_announce(tracker.read_query(path), ip="192.0.2.1")


def _read_layout(data: bytes) -> None:
    read_layout(np.frombuffer(data, np.uint8), file_bytes=len(data), name="x.safetensors")


def _layouts() -> list[bytes]:
    return [(_adapter() / WEIGHTS_FILE).read_bytes()]


def _read_sealed(data: bytes) -> None:
    reader = sealing.UnsealingReader(io.BytesIO(data), _KEY)
    while reader.read(4_096):
        pass


def _sealed() -> list[bytes]:
    sealed = _scratch() / "sealed"
    sealing.seal(_adapter() / WEIGHTS_FILE, sealed, _KEY)
    return [sealed.read_bytes()]


def _read_version(parent: Path | None, data: bytes) -> None:
    target = _scratch() / "decoded"
    target.mkdir(exist_ok=True)
    files = {path.name: path.stat().st_size for path in _adapter().iterdir()}
    delta.decode(io.BytesIO(data), target, files=files, parent=parent)


def _versions(parent: Path | None) -> list[bytes]:
    payload = _scratch() / "payload"
    delta.encode(_adapter(), payload, parent=parent)
    return [payload.read_bytes()]


def _read_adapter(data: bytes) -> None:
    """Read an adapter. The bytes before the first zero byte are its configuration, the rest its weights."""
    config, _, weights = data.partition(b"\0")
    directory = _scratch() / "adapter_read"
    directory.mkdir(exist_ok=True)
    (directory / CONFIG_FILE).write_bytes(config)
    (directory / WEIGHTS_FILE).write_bytes(weights)
    load_adapter(directory)


def _adapters() -> list[bytes]:
    return [(_adapter() / CONFIG_FILE).read_bytes() + b"\0" + (_adapter() / WEIGHTS_FILE).read_bytes()]


@cache
def _scratch() -> Path:
    """Make a directory that is removed when the process ends. If libFuzzer ends the process first, the directory is
    removed together with TMPDIR.
    """
    directory = tempfile.TemporaryDirectory(prefix="echo-fuzz-")
    _KEPT.append(directory)
    return Path(directory.name)


_KEPT: Final[list[tempfile.TemporaryDirectory[str]]] = []


@cache
def _adapter() -> Path:
    directory = _scratch() / "adapter"
    directory.mkdir()
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"
    weights = {
        name.format("A"): np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8),
        name.format("B"): np.linspace(-1, 1, 16, dtype=np.float32).reshape(8, 2),
    }
    save_file(weights, directory / WEIGHTS_FILE)
    (directory / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    return directory


def _torrents() -> list[bytes]:
    return [make_torrent(_adapter()).torrent]


TARGETS: Final[Mapping[str, Target]] = {
    "frames from nodes": Target(read=codec.decode_from_node, examples=_from_node, mutate=frame),
    "frames from hubs": Target(read=codec.decode_from_hub, examples=_from_hub, mutate=frame),
    "large frames": Target(read=_read_large, examples=_from_node, runs=DEAR_RUNS, mutate=frame),
    "announces": Target(
        read=_read_announce, examples=lambda: [b"info_hash=" + b"%41" * 20 + b"&port=6881&left=0&event=started"]
    ),
    "credentials": Target(
        read=lambda data: Credentials.of_header(data.decode("latin-1")),
        examples=lambda: [Credentials(hello=b"hello", nonce=bytes(32), proof=b"proof").header().encode()],
    ),
    "bencode": Target(read=bencode.decode, examples=lambda: [b"d4:listli1ei-2ee3:mapd1:a0:ee"]),
    "manifests": Target(read=_read_manifest, examples=lambda: [_manifest().encode()], runs=DEAR_RUNS, mutate=text),
    "torrents": Target(read=read_torrent, examples=_torrents, runs=DEAR_RUNS),
    "tensor files": Target(read=_read_layout, examples=_layouts, runs=DEAR_RUNS),
    "adapters": Target(read=_read_adapter, examples=_adapters, runs=DEAR_RUNS),
    "sealed files": Target(read=_read_sealed, examples=_sealed, runs=DEAR_RUNS),
    "keyframes": Target(read=lambda data: _read_version(None, data), examples=lambda: _versions(None), runs=DEAR_RUNS),
    "deltas": Target(
        read=lambda data: _read_version(_adapter(), data), examples=lambda: _versions(_adapter()), runs=DEAR_RUNS
    ),
    "mesh greetings": Target(read=node_of, examples=lambda: [bytes(64)], runs=DEAR_RUNS),
}
