"""A work loop (the node's core, without I/O) with a scripted clock and scripted events."""

from collections.abc import Iterable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from echo_node.core.effects import Effect, SendMessage
from echo_node.core.events import ArtefactReady, EngineReady, Event, RolloutsFinished
from echo_node.core.work import WorkLoop
from echo_shared.sampling.interface import DrawnPart, FinishedRollout
from echo_shared.wire.messages import (
    ArtefactOffer,
    Fetched,
    FinishReason,
    Lease,
    LeasedPrefix,
    Rollout,
    RolloutParts,
    Welcome,
)

E = TypeVar("E")
M = TypeVar("M")
WIDTH = 4


def offer(version: int) -> ArtefactOffer:
    return ArtefactOffer(manifest=str(version).encode(), signature=bytes(64), torrent=b"", web_seed_path="/a/")


def welcome(version: int = 0) -> Welcome:
    return Welcome(
        run_id="run",
        run_name="run",
        node_id="node",
        base=offer(-1),
        policy=offer(version) if version else None,
        policy_version=version,
        tracker_path="/announce/k",
        heartbeat_s=5.0,
        run_keys=(),
    )


def lease(lease_id: int, *, version: int = 0, count: int = 2, deadline_s: float = 100.0) -> Lease:
    return Lease(
        lease_id=lease_id,
        group_id=lease_id,
        indices=tuple(range(count)),
        prompt_ids=np.array([1, 2], np.int32),
        seed=9,
        policy_version=version,
        temperature=1.0,
        max_tokens=8,
        stop_ids=(1,),
        deadline_s=deadline_s,
    )


def interruptible(lease_id: int, *, version: int = 0, count: int = 2, max_tokens: int = 1_000) -> Lease:
    update = {"on_new_version": "interrupt", "max_tokens": max_tokens}
    return lease(lease_id, version=version, count=count).model_copy(update=update)


def continued(lease_id: int, index: int, *ids: int) -> Lease:
    given = LeasedPrefix(index=index, ids=np.array(ids, np.int32), logprobs=np.full(len(ids), -0.5, np.float32))
    return lease(lease_id).model_copy(update={"prefixes": (given,)})


def fetched(version: int | None) -> Fetched:
    return Fetched(info_hash=bytes(20), policy_version=version, seconds=1.0, swarm_bytes=5, web_seed_bytes=0)


def here(version: int | None) -> ArtefactReady:
    return ArtefactReady(policy_version=version, fetched=fetched(version))


def finished(lease_id: int, index: int, version: int = 0) -> RolloutsFinished:
    rollout = FinishedRollout(
        lease_id=lease_id,
        group_id=lease_id,
        index=index,
        policy_version=version,
        completion_ids=np.array([4, 1], np.int32),
        behavior_logprobs=np.array([-0.5, -0.1], np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.1,
    )
    return RolloutsFinished(rollouts=(rollout,), tokens_per_s=50.0)


def ended(lease_id: int, index: int, version: int, *, tokens: int) -> RolloutsFinished:
    rollout = replace(
        finished(lease_id, index, version).rollouts[0],
        completion_ids=np.arange(tokens, dtype=np.int32),
        behavior_logprobs=np.full(tokens, -0.5, np.float32),
    )
    return RolloutsFinished(rollouts=(rollout,), tokens_per_s=50.0)


def drawn(lease_id: int, index: int, start: int, *ids: int, version: int = 0) -> DrawnPart:
    logprobs = np.full(len(ids), -0.5, np.float32)
    return DrawnPart(
        lease_id=lease_id,
        index=index,
        policy_version=version,
        start=start,
        ids=np.array(ids, np.int32),
        logprobs=logprobs,
    )


def shown(messages: list[RolloutParts]) -> list[tuple[int, int, int, list[int]]]:
    return [(one.lease_id, one.index, one.start, one.ids.tolist()) for message in messages for one in message.parts]


def spans(rollout: Rollout) -> list[tuple[int, int]]:
    return [(span.policy_version, span.num_tokens) for span in rollout.versions]


class Node:
    """A work loop, its clock, and all effects so far."""

    def __init__(
        self,
        *,
        unfinished: dict[int, tuple[int, ...]] | None = None,
        unacked: Iterable[str] = (),
        devices: tuple[str, ...] = ("",),
    ) -> None:
        self.devices = devices
        self.loop = WorkLoop(
            capacity_factor=2, unfinished=unfinished or {}, unacked=unacked, on_disk={}, devices=devices
        )
        self.now = 0.0
        self.wanted: list[Effect] = []
        self.turn: tuple[Effect, ...] = ()

    def __call__(self, *events: Event, after_s: float = 0.0) -> "Node":
        """Advance the clock, and let the loop handle the events. `turn` then holds the effects of the last event."""
        self.now += after_s
        for event in events:
            self.turn = self.loop.handle(event, self.now, 0.0)
            self.wanted += self.turn
        return self

    def ready(self, version: int = 0) -> "Node":
        return self(welcome(version), here(None), *(EngineReady(width=WIDTH, device=name) for name in self.devices))

    def of(self, kind: type[E]) -> list[E]:
        return [effect for effect in self.turn if isinstance(effect, kind)]

    def sent(self, kind: type[M]) -> list[M]:
        return [
            effect.message
            for effect in self.turn
            if isinstance(effect, SendMessage) and isinstance(effect.message, kind)
        ]

    def ever_sent(self, kind: type[M]) -> list[M]:
        return [e.message for e in self.wanted if isinstance(e, SendMessage) and isinstance(e.message, kind)]
