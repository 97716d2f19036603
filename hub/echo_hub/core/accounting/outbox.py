"""Collection of one turn's effects (the answer to one or several events), in the order of execution: records, receipts,
other actions."""

from __future__ import annotations

from echo_hub.core.accounting.effects import Action, Effect, Record, RolloutReceipt, SendReceipts
from echo_shared.wire.messages import MAX_BATCHED, Checked, DropReason, ReceiptState


class Outbox:
    """Effects of one turn. All receipts for one node form one message, or several if they exceed `MAX_BATCHED`."""

    def __init__(self) -> None:
        self._records: list[Effect] = []
        self._actions: list[Effect] = []
        self._receipts: dict[str, list[RolloutReceipt]] = {}

    def record(self, record: Record) -> None:
        self._records.append(record)

    def act(self, action: Action) -> None:
        self._actions.append(action)

    def receipt(
        self,
        node_id: str,
        rollout_id: str,
        state: ReceiptState,
        reason: DropReason | None = None,
        checked: Checked = Checked.NO,
    ) -> None:
        self._receipts.setdefault(node_id, []).append(RolloutReceipt(rollout_id, state, reason, checked))

    def take(self) -> list[Effect]:
        effects, actions, by_node = self._records, self._actions, self._receipts
        if not (effects or actions or by_node):
            return []
        self._records, self._actions, self._receipts = [], [], {}
        for node_id, receipts in by_node.items():
            while len(receipts) > MAX_BATCHED:
                effects.append(SendReceipts(node_id=node_id, receipts=tuple(receipts[:MAX_BATCHED])))
                receipts = receipts[MAX_BATCHED:]
            effects.append(SendReceipts(node_id=node_id, receipts=tuple(receipts)))
        effects += actions
        return effects
