from __future__ import annotations

from echo_hub.core.accounting.effects import FinishRun, GroupOpened, SendReceipts
from echo_hub.core.accounting.outbox import Outbox
from echo_shared.wire.messages import MAX_BATCHED, ReceiptState


def test_records_come_first_then_receipts_then_actions() -> None:
    out = Outbox()
    out.act(FinishRun())
    out.receipt("a", "1-0", ReceiptState.RECEIVED)
    out.record(GroupOpened(group_id=0, seed=1))
    out.receipt("b", "2-0", ReceiptState.RECEIVED)
    out.receipt("a", "1-1", ReceiptState.RECEIVED)
    effects = out.take()
    assert [type(effect) for effect in effects] == [GroupOpened, SendReceipts, SendReceipts, FinishRun]
    assert isinstance(effects[1], SendReceipts)
    assert [receipt.rollout_id for receipt in effects[1].receipts] == ["1-0", "1-1"]
    assert out.take() == []


def test_receipts_are_batched_to_what_a_message_may_hold() -> None:
    out = Outbox()
    for index in range(MAX_BATCHED + 1):
        out.receipt("a", f"1-{index}", ReceiptState.TRAINED)
    sizes = [len(effect.receipts) for effect in out.take() if isinstance(effect, SendReceipts)]
    assert sizes == [MAX_BATCHED, 1]
