"""One trained group of two episodes with handmade turns: tool calls, results, messages, rewards of turns."""

from __future__ import annotations

from itertools import count

import numpy as np

from echo_hub.core.accounting.effects import (
    Effect,
    GroupOpened,
    RolloutReceived,
    RolloutsDropped,
    RolloutsLeased,
    ScoreRecorded,
    SessionNoted,
    StepPlanned,
    StepTrained,
)
from echo_hub.run.base_model import PromptCodec
from echo_hub.store.store import Store
from echo_shared.records.rollout import RolloutPayload
from echo_shared.wire.messages import DropReason, FinishReason
from tests.echo_hub.run.test_chat_template import QWEN3, RESULT, TOOL, codec_of

NODE = "a" * 20
CALL = '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12 * 34"}}\n</tool_call>'
BAD_CALL = "<tool_call>\n{calculate}\n</tool_call>"


def codec_of_chat() -> PromptCodec:
    return codec_of(QWEN3).with_tools([TOOL])


def write_episodes(store: Store, codec: PromptCodec, *, turns: int) -> None:
    """Write group 0 as step 1: episode 0 has `turns` turns, episode 1 has one. The second turn was leased twice."""
    store.node_seen(node_id=NODE, public_key=bytes(32), name="ada", backend="t", device="d", now=1.0)
    leases, batch = count(1), list[str]()
    effects: list[Effect] = [GroupOpened(group_id=0, seed=0)]
    for index, length in ((0, turns), (1, 1)):
        for turn in range(length):
            if (index, turn) == (0, 1):
                effects += _expired(next(leases))
            lease = next(leases)
            name = f"{lease}-{index}"
            batch.append(name)
            effects += [_lease(lease, index, turn), _received(codec, name, turn, is_last=turn == length - 1)]
            if turn < length - 1:
                ids = codec.encode_answer(_said(turn), after=codec.end_of_reply)
                reward = 0.25 if turn % 2 else -0.25
                effects.append(ScoreRecorded(rollout_id=name, reward=None, observation_ids=ids, turn_reward=reward))
            else:
                effects.append(ScoreRecorded(rollout_id=name, reward=1.0 - index, components={"score": 1.0 - index}))
    store.apply(effects, now=5.0)
    planned = StepPlanned(step=1, group_ids=(0,), rollout_ids=tuple(batch), staleness=(0,), planned_at=8.0)
    trained = StepTrained(step=1, rollout_ids=tuple(batch), metrics={"loss": 0.5}, trained_at=10.0)
    store.apply([planned, trained], now=10.0)


def write_loss(store: Store) -> None:
    """Record the loss of the session of episode 1 at its second turn: the turn is dropped, and the episode starts
    again.
    """
    noted = SessionNoted(group_id=0, index=1, attempt=1, losses=1, replaced=0)
    lost = RolloutsDropped(rollout_ids=("90-1",), reason=DropReason.SESSION_LOST, detail="killed by signal 9")
    store.apply([_lease(90, 1, 1), noted, lost], now=5.5)


def _said(turn: int) -> list[dict[str, str]]:
    if turn % 3 == 0:
        return [{**RESULT, "content": f"408 at turn {turn + 1}"}]
    return [{"role": "user", "content": f"The board after turn {turn + 1}:\n#####\n#@$.#\n#####"}]


def _lease(lease: int, index: int, turn: int) -> RolloutsLeased:
    return RolloutsLeased(
        lease_id=lease, node_id=NODE, group_id=0, indices=(index,), turn=turn, policy_version=0, deadline=99.0
    )


def _expired(lease: int) -> list[Effect]:
    return [_lease(lease, 0, 1), RolloutsDropped(rollout_ids=(f"{lease}-0",), reason=DropReason.EXPIRED)]


def _received(codec: PromptCodec, name: str, turn: int, *, is_last: bool) -> RolloutReceived:
    reply = "The answer is 408." if is_last else CALL if turn % 3 == 0 else f"LRUD, turn {turn + 1}"
    ids = codec.encode_reply(BAD_CALL if turn == 2 and not is_last else reply)
    payload = RolloutPayload(
        completion_ids=ids,
        behavior_logprobs=np.full(len(ids), -0.25, np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.5,
    )
    return RolloutReceived(rollout_id=name, received_at=6.0, payload=payload)
