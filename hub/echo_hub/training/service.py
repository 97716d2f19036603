"""The training service: sends batches to the learner, takes its answers, and evaluates versions."""

from __future__ import annotations

import asyncio
from typing import assert_never

from echo_hub.core.accounting.effects import BeginStep, EvaluationDone, FinishRun, HandOver, TrainingAction, TrainStep
from echo_hub.distribution.service import DistributionService
from echo_hub.driving.shared import Shared
from echo_hub.evaluation.by_nodes import NodeEvaluations
from echo_hub.evaluation.due import DueVersions
from echo_hub.evaluation.evaluator import Evaluator, evaluator_of
from echo_hub.evaluation.measuring import EvaluationRecords, Evaluations, Measuring
from echo_hub.intake.episodes import TrainingBatches
from echo_hub.training.own_sampler import OwnSampler
from echo_hub.training.step_settings import RunStepSettings
from echo_hub.training.trainer import Trainer


class TrainingService:
    """Owns the learner process, the evaluations and, in co-located mode, the hub's own sampler."""

    def __init__(self, shared: Shared, distribution: DistributionService, own_sampler: OwnSampler | None) -> None:
        resources = shared.resources
        config, directory, store = resources.config, resources.directory, resources.store
        self._resources = resources
        self._progress = shared.progress
        self._own_sampler = own_sampler
        self.due = DueVersions(config, directory, done=resources.evaluated, first_version=resources.first_version)
        self._batches = TrainingBatches(store, resources.problems)
        self.trainer = Trainer(
            settings=resources.learner,
            run_dir=directory.root,
            batches=self._batches,
            steps=RunStepSettings(
                config,
                directory,
                resources.coordinator,
                steps_before=resources.start.steps_before if resources.start else 0,
            ),
            queue=shared.queue,
            due=self.due,
            pages=shared.changes,
            room=store.room,
            stop_strings=resources.bounds.stop_strings,
            spawned=resources.spawned,
        )
        self._by_nodes = NodeEvaluations(
            sets={chosen: resources.problems.rewards_of(chosen) for chosen in resources.problems.sets},
            queue=shared.queue,
            publishing=distribution.publishing,
            store=store,
            progress=shared.progress,
            live=shared.live,
        )
        self.evaluator: Evaluator | None = None
        """Draws evaluations in the Ray cluster. None if nodes or the learner draw them."""
        if config.evaluation.by == "ray":
            self.evaluator = evaluator_of(resources.learner, logs=directory.root / "logs", cluster=resources.cluster)
        measuring = Measuring(
            config,
            directory,
            stop_ids=resources.stop_ids,
            problems=resources.problems,
            scoring=resources.scoring,
            sessions=resources.sessions,
            own=self.evaluator or self.trainer,
            by_nodes=self._by_nodes,
        )
        records = EvaluationRecords(store, progress=shared.progress, due=self.due, changes=shared.changes)
        self._evaluations = Evaluations(self.due, measuring=measuring, books=records)

    def handle(self, action: TrainingAction) -> None:
        match action:
            case HandOver():
                turns = action.first_turns
                at_hand = None if turns is None else self._batches.at_hand(action.group_id, turns)
                self.trainer.hand_over(action.group_id, action.rollout_ids, at_hand)
            case BeginStep():
                self.trainer.begin(action.step, action.batch)
            case TrainStep():
                self.trainer.train(action.step)
            case EvaluationDone():
                self._by_nodes.done(action.policy_version)
            case FinishRun():
                self._progress.published()
            case _:
                assert_never(action)

    async def run(self) -> None:
        """Train and evaluate until cancelled. If the run has no task, start no learner process and return at once."""
        if not self._resources.config.trains:
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.trainer.run())
            tasks.create_task(self._evaluations.run())
            if self._own_sampler is not None:
                await self._own_sampler.join(self._resources.coordinator.published_version)
