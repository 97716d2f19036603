"""A running node obeys the commands that its owner sends through the hub, and no others."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from echo_node.host import control
from echo_shared.signing import key_file
from echo_shared.signing.identity import Identity
from echo_shared.signing.owner import is_claimed
from echo_shared.wire.messages import FleetReport, Proof
from echo_shared.wire.owner_commands import NodeReport, OwnerCommand, id_of, read_report, sign_command
from tests.echo_node.test_daemon import Node, ready_for

pytest.importorskip("llama_cpp")


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path / "node")


async def told(hub: Any, node: Node, owner: Identity, verb: Any, **about: Any) -> NodeReport:
    """Send a command through the hub, and return the node's report."""
    command = OwnerCommand(verb=verb, hub_key=hub.me.public_key.hex(), sender="phone", sent_at=time.time(), **about)
    said = sign_command(command, owner)
    before = len(hub.all(FleetReport))
    await hub.send(said)
    await hub.until(lambda: len(hub.all(FleetReport)) > before)
    return read_report(hub.all(FleetReport)[-1], id_of(said), key_file.load(node.paths.identity_key).public_key)


async def test_the_owner_pauses_and_resumes_the_node_through_the_hub(hub: Any, node: Node) -> None:
    node.paths.data_dir.mkdir(parents=True, exist_ok=True)
    owner = key_file.load_or_create(node.paths.owner_key)
    async with node.running(hub.url) as daemon:
        await hub.until(ready_for(hub, 0))
        me, claim = key_file.load(node.paths.identity_key), hub.all(Proof)[-1].owner
        assert claim.owner_key == owner.public_key
        assert is_claimed(claim.owner_key, claim.signature, node_id=me.node_id, hub_key=hub.me.public_key)
        report = await told(hub, node, owner, "status")
        assert (report.problem, report.state) == ("", "waiting") and "llama_cpp" in report.device
        paused = await told(hub, node, owner, "pause", pause_s=3_600.0)
        assert paused.state == "paused" and "until" in paused.reason
        assert "Paused by you until" in daemon.snapshot().holds["paused"] and node.paths.pause_file.exists()
        stranger = await told(hub, node, Identity.generate(), "resume")
        assert "not signed with this owner's key" in stranger.problem and stranger.state == "paused"
        resumed = await told(hub, node, owner, "resume")
        assert resumed.problem == "" and resumed.state != "paused", resumed.reason
        assert not node.paths.pause_file.exists()


async def test_a_running_node_joins_and_leaves_its_owner(hub: Any, node: Node) -> None:
    async with node.running(hub.url):
        await hub.until(ready_for(hub, 0))
        assert hub.all(Proof)[-1].owner is None
        owner = key_file.load_or_create(node.paths.owner_key)
        await control.ask(node.paths.control_file, "owner")
        await hub.until(lambda: hub.all(Proof)[-1].owner is not None)
        assert hub.all(Proof)[-1].owner.owner_key == owner.public_key
        node.paths.owner_key.unlink()
        await control.ask(node.paths.control_file, "owner")
        await hub.until(lambda: hub.all(Proof)[-1].owner is None)
