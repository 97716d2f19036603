"""Attacks on a node: by a hub that is hostile itself, and by whoever reaches a node's ports.

The node is `echo-node join` in a process of its own. It must not take what is forged, not write outside its own
directory, not fail by an error of its own, and not take memory without bound; each attack says what it did instead.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import subprocess
import zlib
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgpack
import numpy as np
from pydantic import ValidationError
from safetensors.numpy import load_file, save_file

from benchmarks.driven_hub import DrivenHub, make_lease, write_adapter
from benchmarks.trust.protocol import Unnoticed
from echo_shared.identity import Identity
from echo_shared.messages import (
    ArtefactOffer,
    DropReason,
    Fetched,
    KeyframeWanted,
    LeaseReturned,
    LeaseRevoked,
    NodeStatus,
    Peers,
    PolicyPublished,
    Receipt,
    Receipts,
    ReceiptState,
    Rollout,
    Standby,
    StandbyReason,
    Way,
)
from echo_shared.messages.fields import printable
from echo_shared.process_memory import own_bytes

WAITS_S: Final = 60.0
QUIET_S: Final = 3.0
"""What a node has not done after this time it does not do."""
LOOK_S: Final = 0.1
MOST_BYTES: Final = 2**30
"""Of memory, for a node of a model of a few kilobytes."""
MOST_LOGGED: Final = 16 * 10**6
"""Three files of its own, and what it has said aloud."""
STEERING: Final = "\x1b[2J\x1b]0;owned\x07\r\u202e\u2028<b>\x00"
_CRASHED: Final = "Traceback (most recent call last)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The node that is attacked."""

    process: subprocess.Popen[str]
    home: Path

    @property
    def said(self) -> str:
        return self.home.with_suffix(".log").read_text(errors="replace")

    @property
    def has_ended(self) -> bool:
        return self.process.poll() is not None

    async def says(self, text: str) -> str:
        """Waits for a text in its log; the line. Raises Unnoticed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WAITS_S):
                while True:
                    found = [line.strip() for line in self.said.splitlines() if text.lower() in line.lower()]
                    if found:
                        return found[0][:200]
                    await asyncio.sleep(LOOK_S)
        raise Unnoticed(f"the node has not said {text!r}: {self.said[-300:]!r}")

    @property
    def logged(self) -> str:
        """The same, and what it keeps by itself."""
        files = self.home.rglob("*.log*")
        return self.said + "".join(path.read_bytes().decode(errors="surrogateescape") for path in files)

    def check_logs(self) -> None:
        """Raises Unnoticed where a log is too long, or something in it steers a terminal."""
        logged = self.logged
        if printable(logged) != logged:
            raise Unnoticed("something in the node's logs steers a terminal")
        if len(logged) > MOST_LOGGED:
            raise Unnoticed(f"the node has logged {len(logged) / 1e6:.1f} MB")

    def check(self) -> None:
        """Raises Unnoticed where it has failed by itself, or has taken too much."""
        if _CRASHED in self.said:
            raise Unnoticed(f"the node failed by an error of its own: {self.said[-500:]!r}")
        if own_bytes(self.process.pid) > MOST_BYTES:
            raise Unnoticed(f"the node has taken {own_bytes(self.process.pid) / 1e6:.0f} MB")


Join = Callable[[], Node]
"""Starts the node."""
Attack = Callable[[DrivenHub, Join], Awaitable[str]]


def _resigned(hub: DrivenHub, offer: ArtefactOffer, **changes: Any) -> ArtefactOffer:
    """The offer with another manifest, truly signed; what it says, this software would not write."""
    manifest = json.dumps({**json.loads(offer.manifest), **changes}).encode()
    return offer.model_copy(update={"manifest": manifest, "signature": hub.me.sign(manifest)})


async def ready(hub: DrivenHub, join: Join) -> Node:
    """A node that can sample from the base."""
    await hub.publish_base()
    node = join()
    await hub.until(lambda: any(status.policy_version == 0 for status in hub.all(NodeStatus)))
    return node


async def _ignored(hub: DrivenHub, node: Node, version: int) -> str:
    """The node does not come to hold this version, and works on."""
    await asyncio.sleep(QUIET_S)
    if any(status.policy_version == version for status in hub.all(NodeStatus)):
        raise Unnoticed(f"the node samples by version {version}")
    if node.has_ended:
        node.check()
        return f"the node has ended: {node.said.strip().splitlines()[-1][:160]}"
    lease = await hub.lease(900, version=0, count=1)
    await hub.finished(lease)
    said = [type(message).__name__ for message in hub.said if isinstance(message, Fetched | KeyframeWanted)]
    return f"version {version} is not taken, version 0 is sampled from; said: {', '.join(said) or 'nothing'}"


async def impostor(hub: DrivenHub, join: Join) -> str:
    """Answers for a hub whose key it does not hold."""
    await hub.publish_base()
    hub.forges_signature = True
    return await join().says("could not prove")


async def other_key(hub: DrivenHub, join: Join) -> str:
    """Another hub answers at the address that the node knows."""
    node = await ready(hub, join)
    await hub.close()
    hub.me = Identity.generate()
    await hub.open()
    return await node.says("key is not the one")


async def unsigned_manifest(hub: DrivenHub, join: Join) -> str:
    """A base model that nobody has signed."""
    await hub.publish_base()
    offer = hub.offers[None]
    hub.offers[None] = offer.model_copy(update={"signature": bytes(64)})
    return await join().says("not signed")


async def path_out_of_the_directory(hub: DrivenHub, join: Join) -> str:
    """A file whose path leads out of the node's directory."""
    await hub.publish_base()
    file = {"path": "../../stolen.json", "size_bytes": 1, "sha256": "0" * 64}
    hub.offers[None] = _resigned(hub, hub.offers[None], files=[file])
    return await join().says("manifest is not valid")


async def pickled_model(hub: DrivenHub, join: Join) -> str:
    """A model in a format that runs code."""
    await hub.publish_base()
    file = {"path": "pytorch_model.bin", "size_bytes": 1, "sha256": "0" * 64}
    hub.offers[None] = _resigned(hub, hub.offers[None], files=[file])
    return await join().says("manifest is not valid")


async def poisoned_pieces(hub: DrivenHub, join: Join) -> str:
    """A version whose bytes are not those that were signed."""
    node = await ready(hub, join)
    directory = hub.published(1)
    write_adapter(directory, 1)
    offer = await hub.offer(1, directory)
    for sealed in hub.carriers.rglob(f"*{directory.name}*/*"):
        content = bytearray(sealed.read_bytes())
        content[len(content) // 2] ^= 1
        sealed.write_bytes(content)
    await hub.send(PolicyPublished(policy_version=1, offer=offer))
    return await _ignored(hub, node, 1)


async def _poisoned_adapter(hub: DrivenHub, join: Join, change: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    node = await ready(hub, join)
    directory = hub.published(1)
    write_adapter(directory, 1)
    weights = directory / "adapter_model.safetensors"
    save_file(change(load_file(weights)), weights)
    await hub.send(PolicyPublished(policy_version=1, offer=await hub.offer(1, directory)))
    lease = await hub.lease(1, version=1, count=1)
    await hub.until(lambda: hub.all(LeaseReturned) or hub.rollouts(lease))
    if hub.rollouts(lease):
        raise Unnoticed("something was drawn by it")
    await hub.finished(await hub.lease(2, version=0, count=1))
    node.check()
    return f"given back: {hub.all(LeaseReturned)[0].reason[:120]}"


async def adapter_of_nan(hub: DrivenHub, join: Join) -> str:
    """A signed version whose weights are no numbers."""
    return await _poisoned_adapter(
        hub, join, lambda weights: {name: np.full_like(one, np.nan) for name, one in weights.items()}
    )


async def adapter_of_other_parts(hub: DrivenHub, join: Join) -> str:
    """A signed version that changes what engines cannot adapt."""
    return await _poisoned_adapter(
        hub, join, lambda weights: {name.replace("q_proj", "embed_tokens"): one for name, one in weights.items()}
    )


async def huge_version(hub: DrivenHub, join: Join) -> str:
    """A version that says that it has a petabyte."""
    node = await ready(hub, join)
    directory = hub.published(1)
    write_adapter(directory, 1)
    offer = await hub.offer(1, directory)
    files = [{**file, "size_bytes": 10**15} for file in json.loads(offer.manifest)["files"]]
    await hub.send(PolicyPublished(policy_version=1, offer=_resigned(hub, offer, files=files)))
    return await _ignored(hub, node, 1)


async def lease_beyond_bounds(hub: DrivenHub, join: Join) -> str:
    """A completion of two billion tokens is asked for."""
    node = await ready(hub, join)
    await hub.send_raw(make_lease(1, version=0), max_tokens=2**31 - 1)
    return await node.says("message is not valid")


async def lease_of_no_token(hub: DrivenHub, join: Join) -> str:
    """A prompt of tokens that the model does not have."""
    node = await ready(hub, join)
    lease = await hub.lease(1, version=0, count=2, prompt_ids=np.array([10**6], np.int32))
    await hub.until(lambda: hub.all(LeaseReturned))
    if any(rollout.lease_id == lease.lease_id for rollout in hub.all(Rollout)):
        raise Unnoticed("something was drawn")
    node.check()
    return f"given back: {hub.all(LeaseReturned)[0].reason[:120]}"


async def more_than_asked_for(hub: DrivenHub, join: Join) -> str:
    """10,000 leases of 64 rollouts for a node that holds a few dozen; one that it wants comes behind them."""
    node = await ready(hub, join)
    for lease_id in range(1, 10_000):
        with suppress(ConnectionError, RuntimeError):
            await hub.send(make_lease(lease_id, version=0, count=64))
    await asyncio.sleep(QUIET_S)
    node.check()
    given_back = sum(len(message.indices) for message in hub.all(LeaseReturned))
    done = len(hub.all(Rollout))
    return f"{given_back} rollouts given back, {done} drawn, {own_bytes(node.process.pid) / 1e6:.0f} MB"


async def oversize_frame(hub: DrivenHub, join: Join) -> str:
    """A frame of 64 MiB."""
    node = await ready(hub, join)
    before = hub.closed
    with suppress(ConnectionError):
        await hub.send_bytes(bytes(64 * 2**20))
    await hub.until(lambda: hub.closed > before)
    node.check()
    return "the node has closed the connection"


async def out_of_turn(hub: DrivenHub, join: Join) -> str:
    """Another Welcome in mid-session."""
    node = await ready(hub, join)
    await hub.send_bytes(msgpack.packb(hub.welcome().model_dump()))
    return await node.says("out of turn")


async def noise(hub: DrivenHub, join: Join) -> str:
    """Bytes that are no message."""
    node = await ready(hub, join)
    await hub.send_bytes(secrets.token_bytes(1_000))
    return await node.says("message is not")


async def steering_texts(hub: DrivenHub, join: Join) -> str:
    """Texts that clear a terminal, name its window and turn what follows around, wherever a hub may say something."""
    hub.welcome_changes = {"run_name": STEERING}
    node = await ready(hub, join)
    await hub.lease(1, version=0, count=1)
    for reason in ("no_work_now", "spend_cap", "quarantined", None):
        await hub.send_raw(Standby(reason=None), reason=reason, detail=STEERING)
    await asyncio.sleep(QUIET_S)
    handshakes = hub.handshakes
    await hub.send_raw(LeaseRevoked(lease_id=1, reason=DropReason.REVOKED), reason=STEERING)
    await hub.until(lambda: hub.handshakes > handshakes)  # What is not valid ends the connection, and it comes back.
    await hub.refuse("banned", "x" + STEERING)
    await asyncio.sleep(QUIET_S)
    node.check_logs()
    return f"{len(node.logged)} characters in its logs, nothing in them steers a terminal"


async def flood_of_news(hub: DrivenHub, join: Join) -> str:
    """Tens of thousands of messages of which each could be a line in the node's log."""
    node = await ready(hub, join)
    before = len(node.logged)
    forged = hub.offers[None].model_copy(update={"signature": bytes(64)})
    for number in range(5_000):
        with suppress(ConnectionError, RuntimeError):
            await hub.send(LeaseRevoked(lease_id=number, reason=DropReason.REVOKED))
            await hub.send(Standby(reason=StandbyReason.NO_WORK_NOW if number % 2 else None, detail=f"detail {number}"))
            await hub.send(Receipts(receipts=(Receipt(rollout_id=f"{number}-0", state=ReceiptState.DROPPED),)))
            await hub.send(PolicyPublished(policy_version=number + 1, offer=forged))
            await hub.send(Peers(info_hash=bytes(20), peers=((f"10.0.{number % 250}.1", 1),)))
    await asyncio.sleep(QUIET_S)
    node.check()
    node.check_logs()
    return f"25,000 messages, {(len(node.logged) - before) / 1e3:.0f} KB more in its logs, which are kept to 3 files"


async def endless_file(hub: DrivenHub, join: Join) -> str:
    """A version, by HTTP, that never ends."""
    node = await ready(hub, join)
    directory = hub.published(1)
    write_adapter(directory, 1)
    offer = await hub.offer(1, directory, way=Way.WEB_SEED)
    hub.never_ends = True
    await hub.send(PolicyPublished(policy_version=1, offer=offer.model_copy(update={"peers": ()})))
    how = await _ignored(hub, node, 1)
    node.check()
    kept = sum(path.stat().st_size for path in node.home.rglob("*") if path.is_file())
    if kept > MOST_BYTES:
        raise Unnoticed(f"the node has {kept / 1e6:.0f} MB on disk")
    return f"{hub.num_served / 1e6:.1f} MB were served, {kept / 1e6:.1f} MB are on its disk; {how}"


async def compressed_frame(hub: DrivenHub, join: Join) -> str:
    """A frame that unpacks to 16 MiB, where no compression was agreed on."""
    node = await ready(hub, join)
    before = hub.closed
    payload = zlib.compress(bytes(2**24), 9)[2:-4]
    hub.write_raw(b"\xc2\x7e" + len(payload).to_bytes(2) + payload)  # FIN, RSV1.
    await hub.until(lambda: hub.closed > before)
    node.check()
    return "the node has closed the connection"


async def odd_paths(hub: DrivenHub, join: Join) -> str:
    """Files whose names mean something else elsewhere, turn around, are no text, or are a million."""
    node = await ready(hub, join)
    odd: list[list[str]] = [
        *(
            ["/etc/x.json"],
            ["..\\x.json"],
            ["C:\\x.json"],
            ["C:x.json"],
            ["a/../../x.json"],
            ["./x.json"],
            ["x//y.json"],
        ),
        *(["CON.json"], ["nul.safetensors"], ["x.json "], ["x.json."], ["x\u0000.json"], ["x\n.json"], ["~/x.json"]),
        *(["\u202enosj.exe"], ["x.json:stream"], [""], ["x" * 5_000 + ".json"], ["x.json", "X.json"], ["x.json"] * 2),
        [f"{number}.json" for number in range(100_000)],
    ]
    directory = hub.published(1)
    write_adapter(directory, 1)
    offer = await hub.offer(1, directory)
    for paths in odd:
        files = [{"path": path, "size_bytes": 1, "sha256": "0" * 64} for path in paths]
        with suppress(ConnectionError, RuntimeError, ValidationError):
            await hub.send(PolicyPublished(policy_version=1, offer=_resigned(hub, offer, files=files)))
    how = await _ignored(hub, node, 1)
    node.check()
    node.check_logs()
    return f"{len(odd)} manifests; {how}"


ATTACKS: Final[Mapping[str, Attack]] = {
    "an impostor of the hub": impostor,
    "another hub's key": other_key,
    "unsigned manifest": unsigned_manifest,
    "paths out of the directory": path_out_of_the_directory,
    "pickled model": pickled_model,
    "poisoned pieces": poisoned_pieces,
    "adapter of NaN": adapter_of_nan,
    "adapter of other parts": adapter_of_other_parts,
    "a version of a petabyte": huge_version,
    "a lease beyond bounds": lease_beyond_bounds,
    "a lease of tokens that do not exist": lease_of_no_token,
    "more leases than asked for": more_than_asked_for,
    "oversize frames to a node": oversize_frame,
    "messages out of turn to a node": out_of_turn,
    "noise to a node": noise,
    "texts that steer a terminal": steering_texts,
    "a flood of news": flood_of_news,
    "a file that never ends": endless_file,
    "a compressed frame": compressed_frame,
    "odd paths": odd_paths,
}
"""By name."""
