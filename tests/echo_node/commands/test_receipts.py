"""`echo-node receipts` with a real spool (finished rollouts that a node keeps on disk) and a hub on real sockets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from echo_node.core.effects import RecordReceipts, SpoolLease
from echo_node.host.hubs import HubRecord, Hubs
from echo_node.host.paths import NodePaths
from echo_node.host.spool import Spool
from echo_node.main import app
from echo_shared.errors import CodecError, ConfigError
from echo_shared.records.contribution import sign
from echo_shared.signing import key_file
from echo_shared.signing.identity import Identity, fingerprint
from echo_shared.wire.messages import Checked, DropReason, Receipt, ReceiptState
from tests.echo_node.host.test_spool import receipts, spooled
from tests.echo_shared.records.test_contribution import contribution


@pytest.fixture(autouse=True)
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> NodePaths:
    monkeypatch.setenv("ECHO_NODE_HOME", str(tmp_path / "home"))
    return NodePaths.find(None)


@pytest.fixture
async def joined(bare_hub: Any, paths: NodePaths) -> Any:
    """Return a hub that the node has joined before. The spool has rollouts in four states."""
    record = HubRecord(
        url=bare_hub.url, hub_key_hex=bare_hub.me.public_key.hex(), joined_at=1.0, run_id="run-1", run_name="a run"
    )
    hubs = Hubs(paths)
    hubs.save(record)
    spool = Spool(hubs.directory(record) / "spool.db")
    spool.open()
    spool.begin_run("run-1")
    spool.write([SpoolLease(lease_id=4, indices=(0,)), spooled(3, 0), spooled(2, 0), spooled(1, 0)])
    spool.write([receipts(("1-0", ReceiptState.TRAINED), ("2-0", ReceiptState.RECEIVED))])
    spool.close()
    return bare_hub


async def invoke(*arguments: str) -> Any:
    """Run `echo-node receipts` on a thread: the hub in this process must answer it."""
    return await asyncio.to_thread(lambda: CliRunner().invoke(app, ["receipts", *arguments], catch_exceptions=False))


def hub_says(hub: Any, **states: ReceiptState) -> None:
    for name, state in states.items():
        rollout_id = name.removeprefix("r").replace("_", "-")
        reason = DropReason.STALE if state is ReceiptState.DROPPED else None
        hub.books[rollout_id] = Receipt(rollout_id=rollout_id, state=state, drop_reason=reason)


async def test_both_books_stand_side_by_side_newest_first(joined: Any) -> None:
    hub_says(
        joined,
        r4_0=ReceiptState.LEASED,
        r3_0=ReceiptState.LEASED,
        r2_0=ReceiptState.DROPPED,
        r1_0=ReceiptState.SCORED,
    )
    answer = json.loads((await invoke("list", "--json")).stdout)
    assert [(row["rollout_id"], row["state"], row["hub"]["state"], row["agreement"]) for row in answer["receipts"]] == [
        ("4-0", "leased", "leased", "same"),
        ("3-0", "sent", "leased", "on_its_way"),
        ("2-0", "received", "dropped", "hub_ahead"),
        ("1-0", "trained", "scored", "different"),
    ]
    assert (answer["hub"], answer["run_id"], answer["problem"]) == (joined.url, "run-1", "")
    shown = (await invoke()).stdout
    head, *lines = shown.splitlines()
    assert head.split() == ["ROLLOUT", "SINCE", "NODE", "HUB"]
    assert lines[0].split()[-2:] == ["the", "same"] and "dropped (stale)" in lines[2]
    assert "1-0: It was final here, and a final state never changes. Tell the hub's operator" in shown


async def test_receipts_are_filtered(joined: Any) -> None:
    for arguments, expected in {
        ("--state", "sent"): ["3-0"],
        ("--limit", "2"): ["4-0", "3-0"],
        ("--since", "1h", "--state", "trained"): ["1-0"],
        ("--since", "2999-01-01"): [],
        ("--since", "2020-01-01T10:00"): ["4-0", "3-0", "2-0", "1-0"],
    }.items():
        answer = json.loads((await invoke("list", "--json", "--offline", *arguments)).stdout)
        assert [row["rollout_id"] for row in answer["receipts"]] == expected
        assert all(row["hub"] is None and row["agreement"] is None for row in answer["receipts"])
    with pytest.raises(ConfigError, match="not a length of time"):
        await invoke("list", "--since", "yesterday")
    assert (await invoke("list", "--state", "lost")).exit_code == 2
    assert (await invoke("list", "--offline", "--state", "scored")).stdout == "The node has no such rollouts.\n"


async def test_a_hub_that_cannot_be_asked_keeps_nothing_back(joined: Any) -> None:
    await joined.close()
    found = await invoke("list")
    assert found.exit_code == 0 and "3-0" in found.stdout
    assert "The hub was not asked: The hub cannot be reached." in found.stderr


async def test_a_receipt_is_shown_even_if_the_node_has_forgotten_it(joined: Any) -> None:
    joined.books["9-3"] = Receipt(rollout_id="9-3", state=ReceiptState.TRAINED, checked=Checked.PASSED)
    shown = (await invoke("show", "9-3")).stdout
    assert "node     unknown" in shown and "hub      trained, checked: passed" in shown
    hub_says(joined, r1_0=ReceiptState.TRAINED)
    one = json.loads((await invoke("show", "1-0", "--json")).stdout)
    assert (one["state"], one["hub"]["state"], one["agreement"]) == ("trained", "trained", "same")
    assert "hub" not in (await invoke("show", "1-0", "--offline")).stdout
    with pytest.raises(ConfigError, match="not the id of a rollout"):
        await invoke("show", "one")


async def test_only_the_node_itself_records_receipts(joined: Any, paths: NodePaths) -> None:
    hub_says(joined, r2_0=ReceiptState.TRAINED)
    await invoke("list")
    spool = Spool(Hubs(paths).directory(Hubs(paths).all()[0]) / "spool.db")
    spool.open()
    assert spool.entry("2-0").state == "received"
    spool.write([RecordReceipts(receipts=(joined.books["2-0"],))])
    assert spool.entry("2-0").state == "trained"
    spool.close()


async def test_a_certificate_is_written_with_a_picture_and_verified_offline(
    joined: Any, paths: NodePaths, tmp_path: Path
) -> None:
    me = key_file.load_or_create(paths.identity_key)
    said = contribution(
        hub_key=joined.me.public_key.hex(), node_key=me.public_key.hex(), node_id=me.node_id, node_name="the den"
    )
    joined.certificate = sign(said, joined.me)
    out = tmp_path / "mine.json"
    shown = (await invoke("certificate", "--out", str(out))).stdout
    assert "12 rollouts, 3456 tokens" in shown and str(out.with_suffix(".svg")) in shown
    assert out.read_bytes() == joined.certificate
    assert "the den" in "".join(ElementTree.parse(out.with_suffix(".svg")).getroot().itertext())
    with pytest.raises(ConfigError, match="exists already"):
        await invoke("certificate", "--out", str(out))
    with pytest.raises(ConfigError, match="not a picture"):
        await invoke("certificate", "--out", str(tmp_path / "picture.svg"))
    await joined.close()
    assert "unchanged, and signed by the hub's key" in (await invoke("verify", str(out))).stdout
    verdict = json.loads((await invoke("verify", str(out), "--json")).stdout)
    assert verdict["valid"] and verdict["certificate"] == said.model_dump()
    out.write_bytes(out.read_bytes().replace(b"3456", b"9456"))
    with pytest.raises(CodecError, match="signature is wrong"):
        await invoke("verify", str(out))


async def test_a_certificate_of_an_unknown_hub_needs_its_key(tmp_path: Path) -> None:
    hub = Identity.generate()
    file = tmp_path / "other.json"
    file.write_bytes(sign(contribution(hub_key=hub.public_key.hex()), hub))
    with pytest.raises(ConfigError, match="its hub is unknown here"):
        await invoke("verify", str(file))
    for key in (
        fingerprint(hub.public_key),
        fingerprint(hub.public_key).replace(" ", "").upper(),
        hub.public_key.hex(),
    ):
        assert (await invoke("verify", str(file), "--hub-key", key)).exit_code == 0
    with pytest.raises(ConfigError, match="unknown here"):
        await invoke("verify", str(file), "--hub-key", fingerprint(Identity.generate().public_key))
    with pytest.raises(ConfigError, match="cannot be read"):
        await invoke("verify", str(tmp_path / "none.json"))


async def test_a_node_without_a_hub_reports_it() -> None:
    for command in (["list"], ["show", "1-0"], ["certificate", "--out", "x.json"]):
        with pytest.raises(ConfigError, match="joined no hub yet"):
            await invoke(*command)
