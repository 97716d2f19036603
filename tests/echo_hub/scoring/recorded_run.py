"""A short seeded run of an environment that replays all turns, with made-up nodes and learner, on a real store.

`record` returns everything that the run has stored or sent: rows of the store, receipts, leases and batches. Two nodes
draw replies that depend only on seed, index and turn. One node loses a lease, one sends invalid results, and the hub
restarts once. Without a model and a clock, two records of the same code are equal byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from sqlalchemy import Connection, text

from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting import effects
from echo_hub.core.accounting.effects import (
    RECORDS,
    EvaluationDone,
    PrepareGroup,
    PublishVersion,
    ScoreRollout,
    SendLease,
    SendReceipts,
    SendTrained,
    TrainStep,
)
from echo_hub.core.accounting.events import (
    EvaluationWanted,
    Event,
    GroupPrepared,
    LearnerReady,
    NodeConnected,
    NodeReported,
    RolloutArrived,
    RolloutContinued,
    RolloutRejected,
    RolloutScored,
    StepDone,
    Tick,
    VersionPublished,
)
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.store.reading import read_batch, read_payloads, read_turns
from echo_hub.store.store import Store
from echo_hub.store.unfinished import read_snapshot
from echo_shared.records.rollout import RolloutPayload
from echo_shared.sampling.draws import derive_seed
from echo_shared.wire.messages import DropReason, FinishReason, rollout_id

STEPS, RESTART_AT = 3, 60
ORDERED = {
    "groups": "group_id",
    "rollouts": 'lease_id, "index"',
    "payloads": 'lease_id, "index"',
    "steps": "step",
    "tallies": "node_id, outcome",
}


class RecordedRun:
    """The recorded run. `replies` turns a random number into the token ids of a reply."""

    def __init__(self, config: HubConfig, codec: PromptCodec, reply: Callable[[int], Any]) -> None:
        self.problems = Problems.of_run(config, codec)
        self.codec = codec
        self.reply = reply
        self.settings = CoordinatorSettings(
            mode="async",
            steps=STEPS,
            groups_per_step=2,
            group_size=3,
            deadline_s=30.0,
            max_staleness=1,
            multi_turn=True,
            run_seed=5,
            evaluation_problems=2,
        )
        self.store = Store.open("sqlite://")
        self.now = 1_000.0
        self.lines: list[str] = []
        self.waiting: list[Any] = []
        self.num_events = 0

    def record(self) -> list[str]:
        """Run to the end, and return one line for each row and each message."""
        self._boot()
        while not self.coordinator.status().finished or self.waiting:
            if not self.waiting:
                self.now += 7.0
                self._turn(Tick())
            else:
                self._carry_out(self.waiting.pop(0))
            if self.num_events == RESTART_AT:
                self._boot()
        self.lines += self.store.read(_rows)
        self.store.close()
        return self.lines

    def _boot(self) -> None:
        self.waiting.clear()
        self.coordinator = Coordinator(self.settings, self.store.read(read_snapshot))
        self._take(self.coordinator.start(self.now))
        trained = self.coordinator.status().trained_steps
        self._turn(LearnerReady(policy_version=trained))
        for node_id in ("a", "b"):
            self._turn(NodeConnected(node_id=node_id))
            self._report(node_id)
        self._turn(EvaluationWanted(policy_version=0))

    def _report(self, node_id: str) -> None:
        version = self.coordinator.published_version
        self._turn(NodeReported(node_id=node_id, capacity=4, policy_version=version))

    def _turn(self, event: Event) -> None:
        self.num_events += 1
        self.now += 0.25
        self._take(self.coordinator.handle(event, self.now))

    def _take(self, made: list[effects.Effect]) -> None:
        self.store.apply([effect for effect in made if isinstance(effect, RECORDS)], self.now)
        self.waiting += [effect for effect in made if not isinstance(effect, RECORDS)]

    def _carry_out(self, action: Any) -> None:
        match action:
            case PrepareGroup():
                seed = self.problems.seed(action.group_id)
                num_tokens = len(self.problems.prompt_ids(action.group_id))
                self._turn(GroupPrepared(group_id=action.group_id, seed=seed, prompt=seed, prompt_tokens=num_tokens))
            case SendLease():
                self._draw(action)
            case ScoreRollout():
                self._score(action.rollout_id)
            case SendReceipts():
                said = [(one.rollout_id, one.state, one.drop_reason, one.checked) for one in action.receipts]
                self.lines.append(f"receipts {action.node_id} {json.dumps(said)}")
            case SendTrained():
                self.lines.append(f"trained {json.dumps([action.rollout_ids, action.node_ids])}")
            case TrainStep():
                self.lines.append(f"batch {action.step} {_digest(repr(self.store.read(read_batch, action.step)))}")
                self._turn(StepDone(step=action.step, metrics={"loss": action.step / 8}))
            case PublishVersion():
                self._turn(VersionPublished(policy_version=action.policy_version))
                for node_id in ("a", "b"):
                    self._report(node_id)
            case EvaluationDone():
                self.lines.append(f"evaluated {action.policy_version}")

    def _draw(self, lease: SendLease) -> None:
        """Let the node that holds a lease draw it. Every 11th lease gets lost, and every 13th comes back with invalid
        data."""
        played = self.store.read(read_turns, {(lease.group_id, lease.indices[0])})
        said = [len(turn.observation_ids) for turn in played.get((lease.group_id, lease.indices[0]), ())]
        place = (lease.lease_id, lease.turn, lease.policy_version, lease.seed, lease.goes_on, said)
        self.lines.append(f"lease {lease.node_id} {lease.group_id} {lease.indices} {place}")
        for index in lease.indices if lease.lease_id % 11 else ():
            ids = self.reply(derive_seed(lease.seed, index, lease.policy_version))
            self._turn(
                RolloutArrived(
                    node_id=lease.node_id,
                    rollout_id=rollout_id(lease.lease_id, index),
                    lease_id=lease.lease_id,
                    group_id=lease.group_id,
                    index=index,
                    policy_version_start=lease.policy_version,
                    policy_version_end=lease.policy_version,
                    payload=RolloutPayload(
                        completion_ids=ids,
                        behavior_logprobs=-np.arange(1, len(ids) + 1, dtype=np.float32) / 8,
                        finish_reason=FinishReason.STOP,
                        sampling_s=0.5,
                    ),
                    problem="" if lease.lease_id % 13 else "garbage",
                )
            )

    def _score(self, name: str) -> None:
        found = self.store.read(read_payloads, [name])
        if not found:
            return
        turns = found[0].earlier_turns
        completions = [turn.completion_ids for turn in turns] + [found[0].payload.completion_ids]
        if derive_seed(7, name) % 17 == 0:
            self._turn(RolloutRejected(rollout_id=name, reason=DropReason.SCORER_FAILED, detail="made up"))
            return
        answer = self.problems.respond(found[0].group_id, completions, sum(len(turn.observation_ids) for turn in turns))
        if isinstance(answer, tuple):
            ids, turn_reward = answer
            self._turn(RolloutContinued(rollout_id=name, observation_ids=ids, turn_reward=turn_reward))
        else:
            assert not isinstance(answer, dict)
            self._turn(RolloutScored(rollout_id=name, reward=answer))


def _rows(connection: Connection) -> list[str]:
    return [
        f"{table} {json.dumps({name: _plain(row[name]) for name in sorted(row)})}"
        for table, order in ORDERED.items()
        for row in connection.execute(text(f"SELECT * FROM {table} ORDER BY {order}")).mappings()
    ]


def _plain(value: Any) -> Any:
    return hashlib.blake2b(value, digest_size=8).hexdigest() if isinstance(value, bytes) else value


def _digest(said: str) -> str:
    return hashlib.blake2b(re.sub(r"\s+", " ", said).encode(), digest_size=8).hexdigest()
