from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from echo_hub.core.accounting.effects import LookUpReceipt, RolloutReceipt, SendLease, SendTrained
from echo_hub.intake import receipts as receipts_module
from echo_hub.intake.receipts import ReceiptLookUps, ReceiptsOut, TrainedReceipts
from echo_hub.net.gateway import NodeInfo
from echo_shared.wire.messages import Checked, DropReason, FromHub, Receipt, Receipts, ReceiptState

Drive = Callable[..., Awaitable[Any]]


class Sent:
    def __init__(self) -> None:
        self.messages: list[tuple[str, Receipts]] = []
        self.news = asyncio.Event()

    def send(self, node_id: str, message: FromHub) -> bool:
        assert isinstance(message, Receipts)
        self.messages.append((node_id, message))
        self.news.set()
        return True

    async def until(self, count: int) -> None:
        async with asyncio.timeout(60):
            while len(self.messages) < count:
                self.news.clear()
                await self.news.wait()


class Told(ReceiptsOut):
    def tell(self, node_id: str, receipts: Sequence[RolloutReceipt]) -> None:
        super().tell(node_id, receipts)
        self.flush(node_id)


async def test_a_node_hears_what_the_store_knows_of_its_rollouts(drive: Drive) -> None:
    driven = await drive()
    await driven.node("a")
    await driven.until(lambda: driven.of(SendLease) != [])
    lease = driven.of(SendLease)[0]
    sent = Sent()
    look_ups = ReceiptLookUps(store=driven.async_store, connections=sent, receipts=ReceiptsOut(sent))
    await look_ups.answer("a", [f"{lease.lease_id}-0", "999-0"])
    ((node_id, message),) = sent.messages
    assert node_id == "a"
    assert [(one.state, one.drop_reason) for one in message.receipts] == [
        (ReceiptState.LEASED, None),
        (ReceiptState.DROPPED, DropReason.INVALID),
    ]


async def test_look_ups_are_answered_in_order_and_bounded(drive: Drive, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts_module, "LOOK_UPS_WAITING", 2)
    driven = await drive(running=False)
    sent = Sent()
    look_ups = ReceiptLookUps(store=driven.async_store, connections=sent, receipts=ReceiptsOut(sent))
    for number in range(3):
        look_ups.submit(LookUpReceipt(node_id=f"n{number}", rollout_id="1-0"))
    working = asyncio.create_task(look_ups.run())
    await sent.until(2)
    look_ups.submit(LookUpReceipt(node_id="n3", rollout_id="1-0"))
    await sent.until(3)
    assert [node_id for node_id, _ in sent.messages] == ["n0", "n1", "n3"], "the queue was full for the third of three"
    working.cancel()
    await asyncio.wait([working])


async def test_nodes_are_told_of_a_trained_batch_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts_module, "TOLD_AT_ONCE", 3)
    sent = Sent()

    trained = TrainedReceipts(Told(sent))
    trained.submit(SendTrained(rollout_ids=("1-0", "2-0", "1-1", "1-2"), node_ids=("a", "b", "a", "a")))
    working = asyncio.create_task(trained.run())
    await sent.until(3)
    working.cancel()
    await asyncio.wait([working])
    told = [(node_id, [receipt.rollout_id for receipt in message.receipts]) for node_id, message in sent.messages]
    assert told == [("a", ["1-0", "1-1"]), ("b", ["2-0"]), ("a", ["1-2"])]
    assert {receipt.state for _, message in sent.messages for receipt in message.receipts} == {ReceiptState.TRAINED}


def told(sent: Sent) -> list[tuple[str, list[str]]]:
    return [(node_id, [one.state.value for one in message.receipts]) for node_id, message in sent.messages]


def receipts(*states: ReceiptState) -> tuple[RolloutReceipt, ...]:
    return tuple(RolloutReceipt(f"{number}-0", state) for number, state in enumerate(states))


def test_that_a_rollout_is_scored_or_trained_goes_along_with_the_next_ack() -> None:
    sent = Sent()
    out = ReceiptsOut(sent)
    out.tell("a", receipts(ReceiptState.SCORED))
    out.tell("b", receipts(ReceiptState.RECEIVED, ReceiptState.SCORED))
    assert told(sent) == [("b", ["received", "scored"])]
    out.tell("a", receipts(ReceiptState.RECEIVED))
    assert told(sent)[1:] == [("a", ["scored", "received"])]
    out.tell("a", receipts(ReceiptState.TRAINED))
    out.tell("a", receipts(ReceiptState.DROPPED))
    assert told(sent)[2:] == [("a", ["trained", "dropped"])]
    out.tell("b", receipts(ReceiptState.SCORED))
    out.flush_all()
    assert told(sent)[3:] == [("b", ["scored"])]


async def test_a_receipt_without_others_is_sent_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts_module, "WAIT_S", 0.001)
    sent = Sent()
    out = ReceiptsOut(sent)
    running = asyncio.create_task(out.run())
    for count in (1, 2):
        out.tell("a", receipts(ReceiptState.SCORED))
        await sent.until(count)
    assert told(sent) == [("a", ["scored"])] * 2
    running.cancel()
    await asyncio.wait([running])


async def test_each_nodes_receipts_wait_separately(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(receipts_module, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(receipts_module, "GATHER_S", 0.001)
    sent = Sent()
    out = ReceiptsOut(sent)
    out.tell("a", receipts(ReceiptState.SCORED))
    now = 0.3
    out.tell("b", receipts(ReceiptState.SCORED))
    now = 2.25
    running = asyncio.create_task(out.run())
    await sent.until(1)
    assert told(sent) == [("a", ["scored"])]
    now = 2.5
    await sent.until(2)
    assert told(sent)[1:] == [("b", ["scored"])]
    running.cancel()
    await asyncio.wait([running])


def test_no_message_exceeds_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts_module, "MAX_BATCHED", 3)
    sent = Sent()
    out = ReceiptsOut(sent)
    for count in (2, 2, 1):
        out.tell("a", receipts(*[ReceiptState.SCORED] * count))
    out.flush("a")
    assert told(sent) == [("a", ["scored"] * 2), ("a", ["scored"] * 3)]


async def test_looked_up_receipts_come_after_waiting_ones(drive: Drive) -> None:
    driven = await drive()
    await driven.node("a")
    await driven.until(lambda: driven.of(SendLease) != [])
    sent = Sent()
    out = ReceiptsOut(sent)
    out.tell("a", receipts(ReceiptState.SCORED))
    await ReceiptLookUps(store=driven.async_store, connections=sent, receipts=out).answer("a", ["999-0"])
    assert told(sent) == [("a", ["scored"]), ("a", ["dropped"])]


async def test_receipts_for_all_nodes_are_sent_a_few_nodes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts_module, "WAIT_S", 0.0)
    monkeypatch.setattr(receipts_module, "GATHER_S", 0.0)
    sent = Sent()
    out = ReceiptsOut(sent)
    for number in range(3 * receipts_module.AT_LEAST):
        out.tell(f"n{number}", [RolloutReceipt("1-0", ReceiptState.TRAINED)])
    working = asyncio.create_task(out.run())
    await sent.until(1)
    assert len(sent.messages) == receipts_module.AT_LEAST, "other tasks have their turn"
    await sent.until(3 * receipts_module.AT_LEAST)
    working.cancel()
    await asyncio.wait([working])
    assert [node_id for node_id, _ in sent.messages] == [f"n{number}" for number in range(len(sent.messages))], (
        "the oldest first"
    )


@pytest.mark.parametrize(
    ("state", "checked", "is_warned"),
    [
        (ReceiptState.ANSWERED, Checked.FAILED, True),
        (ReceiptState.ANSWERED, Checked.PASSED, False),
        (ReceiptState.DROPPED, Checked.FAILED, False),
    ],
)
def test_the_operator_hears_of_a_forged_sample_that_a_tenant_has(
    state: ReceiptState, checked: Checked, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    reason = DropReason.FORGED if state is ReceiptState.DROPPED else None
    receipt = Receipt(rollout_id="7-1", state=state, drop_reason=reason, checked=checked)
    receipts_module.warn_if_delivered("a", receipt)
    assert [record.getMessage() for record in caplog.records] == (
        ["a tenant has a forged sample of node a: rollout 7-1"] if is_warned else []
    )


async def test_older_nodes_are_told_words_that_they_know() -> None:
    node = NodeInfo(
        node_id="old",
        public_key=bytes(32),
        name="n",
        backend="torch",
        device="cpu",
        host="127.0.0.1",
        hub_host="127.0.0.1",
        swarm_port=0,
        mesh_port=0,
    )
    sent = Sent()
    new = replace(node, node_id="new", knows_answered=True, knows_session_lost=True)
    out = ReceiptsOut(sent, {"old": node, "newer": replace(node, node_id="newer", knows_answered=True), "new": new})
    lost = RolloutReceipt("7-2", ReceiptState.DROPPED, DropReason.SESSION_LOST)
    for node_id in ("old", "newer", "new"):
        out.tell(node_id, [*receipts(ReceiptState.ANSWERED, ReceiptState.RECEIVED), lost])
    assert told(sent) == [
        ("old", ["evaluated", "received", "dropped"]),
        ("newer", ["answered", "received", "dropped"]),
        ("new", ["answered", "received", "dropped"]),
    ]
    reasons = [message.receipts[-1].drop_reason for _, message in sent.messages]
    assert reasons == [DropReason.EXPIRED, DropReason.EXPIRED, DropReason.SESSION_LOST]
