"""Rollouts of a run with handmade texts: a step of two groups of two, then a dropped group."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from echo_hub.core.accounting.effects import (
    GroupDropped,
    GroupOpened,
    RolloutReceived,
    RolloutsDropped,
    RolloutsLeased,
    ScoreRecorded,
    StepPlanned,
    StepTrained,
    VersionRecorded,
)
from echo_hub.run.base_model import PromptCodec
from echo_hub.store.store import Store
from echo_shared.records.rollout import DrawnSpan, RolloutPayload
from echo_shared.wire.messages import DropReason, FinishReason

TEXTS = ("<script>alert(1)</script>", "plain 3", "5", "a longer one", "All wrong", "all wrong")
REWARDS = (1.0, 0.0, 0.25, 0.5, 0.0, 0.0)
NODE, OTHER = "a" * 20, "b" * 20


def codec_of_bytes() -> PromptCodec:
    """Return a codec whose tokens are bytes, which can encode any text."""
    vocabulary = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab={**vocabulary, "<end>": len(vocabulary)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    return PromptCodec(tokenizer, stop_ids=(len(vocabulary),), chat=None)


def write_rollouts(store: Store, codec: PromptCodec, texts: Sequence[str] = TEXTS) -> None:
    """Write groups 0 and 1 as step 1, at 10 s; group 2 is dropped without an advantage, at 20 s."""
    for node_id, name in ((NODE, "<b>ada</b>"), (OTHER, "bob")):
        store.node_seen(node_id=node_id, public_key=bytes(32), name=name, backend="t", device="d", now=1.0)
    ids = [f"{1 + number // 2}-{number % 2}" for number in range(6)]
    for group in range(3):
        lease = RolloutsLeased(
            lease_id=group + 1,
            node_id=NODE if group else OTHER,
            group_id=group,
            indices=(0, 1),
            turn=0,
            policy_version=0,
            deadline=99.0,
        )
        store.apply([GroupOpened(group_id=group, seed=group), lease], now=2.0 + group)
    arrived = [
        RolloutReceived(rollout_id=name, received_at=6.0, payload=_payload(codec, text, number))
        for number, (name, text) in enumerate(zip(ids, texts, strict=True))
    ]
    store.apply(arrived, now=6.0)
    store.apply([ScoreRecorded(rollout_id=n, reward=r) for n, r in zip(ids, REWARDS, strict=True)], now=7.0)
    batch = tuple(ids[:4])
    planned = StepPlanned(step=1, group_ids=(0, 1), rollout_ids=batch, staleness=(0, 1), planned_at=8.0)
    trained = StepTrained(step=1, rollout_ids=batch, metrics={"loss": 0.5}, trained_at=10.0, drawn_by_several=(ids[0],))
    store.apply([planned, trained, VersionRecorded(policy_version=1, published_at=11.0)], now=10.0)
    flat = RolloutsDropped(rollout_ids=tuple(ids[4:]), reason=DropReason.NO_ADVANTAGE)
    store.apply([flat, GroupDropped(group_id=2, reason=DropReason.NO_ADVANTAGE)], now=20.0)
    store.prune(1)


def _payload(codec: PromptCodec, text: str, number: int) -> RolloutPayload:
    """Return a payload whose token probabilities fall by 5 % from one token to the next. In the first rollout, another
    node and version sampled the first tokens.
    """
    ids = np.array([*codec.encode_prompt(text), codec.stop_ids[0]], np.int32)
    spans = (
        DrawnSpan(node_id=NODE, policy_version=0, num_tokens=3),
        DrawnSpan(node_id=OTHER, policy_version=1, num_tokens=len(ids) - 3),
    )
    return RolloutPayload(
        completion_ids=ids,
        behavior_logprobs=(-0.05 * np.arange(len(ids))).astype(np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.5,
        spans=() if number else spans,
    )
