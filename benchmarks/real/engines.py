"""Engines of nodes with the trained model: speed, memory, difference from the learner, and the hub's verdict about
them.

Every engine samples the same groups with the newest version. A learner in the state of this version takes each engine's
rollouts as one training step, which gives `mismatch_kl` and the step's seconds. The verifier measures the rounding of
the engine's class, as in a hub, and examines the rollouts. Then honest nodes, alone in their class, return these
rollouts in random orders. If the hub's rules convict a node, it counts as a false quarantine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.harness.engine import Run, SamplingEngine, group_request
from benchmarks.harness.pool import apart
from benchmarks.honesty.judging import honest_nodes, known_by
from benchmarks.honesty.samplers import UNCHANGED, Engine
from echo_hub.config.file import load_config
from echo_hub.core.trust.evidence import Evidence
from echo_hub.core.trust.numerics import NumericsClass
from echo_hub.intake.episodes import PROMPTS
from echo_hub.learner.policy import Policy
from echo_hub.learner.settings import LearnerSettings, TrainingGroup, TrainingRollout
from echo_hub.learner.step import make_optimizer, train_step
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.scoring.problems import Problems
from echo_hub.verify.drawn import DrawnRollout, unpack_evidence, unpack_spans
from echo_hub.verify.worker import Examiner
from echo_node.host import hardware
from echo_shared.records.rollout import DrawnSpan
from echo_shared.records.step_figures import MISMATCH_KL, TRAIN_S
from echo_shared.sampling.interface import FinishedRollout, GroupRequest

ENGINES: Final = {name: engine for name, engine in UNCHANGED.items() if engine.precision != "f16"}
GROUPS: Final = 24
FIRST_GROUP: Final = 1_000_000
"""Number of the first group that the engines sample. The run itself trained on no problems of groups from this number
on.
"""
WIDTH: Final = 64
NODES: Final = 8
"""Number of honest nodes of each class. They return the same rollouts, in different orders."""


class TrainedRun:
    """The newest version of a finished run, and groups of its training problems."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.config = load_config(directory.config, {})
        self.base = resolve_base(self.config.model.base)
        self._codec = PromptCodec.of_run(self.config, self.base)
        self.problems = Problems.of_run(self.config, self._codec)
        self.version = directory.adapter_versions()[-1]
        self.adapters = {self.version: directory.adapter(self.version)}
        learner = self.config.learner.model_copy(update={"threads": hardware.sensible_threads()})
        self.settings = LearnerSettings.of_run(
            self.config.model_copy(update={"learner": learner}), base_dir=self.base, stop_ids=self._codec.stop_ids
        )

    @cached_property
    def groups(self) -> list[GroupRequest]:
        return [
            group_request(
                number,
                self.problems.prompt_ids(number),
                seed=self.problems.seed(number),
                indices=range(self.config.training.group_size),
                max_tokens=self.settings.max_tokens,
                stop_ids=self.settings.stop_ids,
                temperature=self.settings.temperature,
            )
            for number in range(FIRST_GROUP, FIRST_GROUP + GROUPS)
        ]

    def sampled_by(self, engine: Engine, scratch: Path) -> tuple[Run, int]:
        """Sample all groups with an engine in a separate process. Return the rollouts, and the resident memory of the
        process in bytes. `scratch` holds the engine's converted files.
        """
        scratch.mkdir(parents=True, exist_ok=True)
        with apart(SamplingEngine, engine.backend, self.base, scratch, engine.precision) as process:
            process.open(width=WIDTH)
            process.set_policy(self.adapters[self.version])
            process.sample(self.groups[:2])
            return process.sample(self.groups), process.resident_bytes()

    def step_on(self, rollouts: Sequence[FinishedRollout], policy: Policy) -> dict[str, float]:
        """Do one training step of the newest version on these rollouts. Return its figures."""
        policy.set_adapter(policy.read_adapter(self.adapters[self.version]))
        of_group: dict[int, list[TrainingRollout]] = {}
        for rollout in rollouts:
            reward = self.problems.respond(rollout.group_id, [rollout.completion_ids])
            assert isinstance(reward, float), "the task has one turn, and no components"
            of_group.setdefault(rollout.group_id, []).append(
                TrainingRollout(
                    **rollout.content(), loss_mask=np.ones(len(rollout.completion_ids), bool), reward=reward
                )
            )
        groups = [
            TrainingGroup(prompt_ids=self.problems.prompt_ids(number), rollouts=tuple(of_group[number]))
            for number in of_group
        ]
        return train_step(policy, make_optimizer(policy, self.config.training), groups, self.settings)

    def verdict(
        self, engine: Engine, rollouts: Sequence[FinishedRollout], examiner: Examiner, seed: int
    ) -> dict[str, Any]:
        """Judge honest nodes with this engine. Return how many the hub's rules convict, and the highest sum of
        evidence.
        """
        numerics = NumericsClass(engine.backend, engine.precision, "cpu")
        prompts = [self.problems.prompt_ids(number) for number in range(PROMPTS)]
        answer = examiner.measure(numerics.rounding, self.version, self.adapters, prompts)
        known = known_by(numerics, unpack_evidence(answer["evidence"]), temperature=self.settings.temperature)
        shown: list[tuple[int, Evidence]] = []
        node = str(numerics)
        group_of = {_id(node, rollout): rollout.group_id for rollout in rollouts}
        for found in examiner.examine([self._as_drawn(node, rollout) for rollout in rollouts], self.adapters):
            shown.append((group_of[found["rollout_id"]], unpack_spans(found["spans"])[0][1]))
        return {"honest_rollouts": NODES * len(shown), **honest_nodes(shown, known, count=NODES, seed=seed)}

    def _as_drawn(self, node: str, rollout: FinishedRollout) -> DrawnRollout:
        span = DrawnSpan(node_id=node, policy_version=self.version, num_tokens=len(rollout.completion_ids))
        return DrawnRollout(
            rollout_id=_id(node, rollout),
            prompt_ids=self.problems.prompt_ids(rollout.group_id),
            **rollout.content(),
            spans=(span,),
            seed=self.problems.seed(rollout.group_id),
            index=rollout.index,
        )


def _id(node: str, rollout: FinishedRollout) -> str:
    """Return an id that is unique over all engines, because the verifier remembers rollouts by their ids."""
    return f"{node} {rollout.group_id}-{rollout.index}"


def measured(
    run: TrainedRun, engine: Engine, scratch: Path, seed: int, policy: Policy, examiner: Examiner
) -> dict[str, Any]:
    """Return the row of one engine: speed, memory, difference from the learner, and verdict."""
    sampled, resident_bytes = run.sampled_by(engine, scratch)
    step = run.step_on(sampled.rollouts, policy)
    return {
        "tokens_per_s": sampled.tokens_per_s,
        "engine_gb": resident_bytes / 1e9,
        "mismatch_kl": step[MISMATCH_KL.key],
        "step_s": step[TRAIN_S.key],
        **run.verdict(engine, sampled.rollouts, examiner, seed),
    }
