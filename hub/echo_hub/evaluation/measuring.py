"""Evaluate a version on the run's nodes, if the settings say so and nodes finish it; else with the hub's own
sampler."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from echo_hub.config.sections import HubConfig
from echo_hub.evaluation.by_hub import HeldOut, VersionSampler, drawn_by, evaluate_sets, scored_by
from echo_hub.evaluation.by_nodes import PATIENCE_DEADLINES, NodeEvaluations
from echo_hub.run.directory import RunDirectory
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_shared.records.run import Evaluation


class Measuring:
    """Evaluates versions. `own`: the hub's own sampler (the learner, or a process in the Ray cluster)."""

    def __init__(
        self,
        config: HubConfig,
        directory: RunDirectory,
        *,
        stop_ids: tuple[int, ...],
        problems: Problems,
        scoring: ScoringPool,
        own: VersionSampler,
        by_nodes: NodeEvaluations,
    ) -> None:
        self._config = config
        self._directory = directory
        self._stop_ids = stop_ids
        self._problems = problems
        self._scoring = scoring
        self._own = own
        self._by_nodes = by_nodes

    async def measure(self, policy_version: int) -> Sequence[Evaluation]:
        """Return the figures of every set and kind. Raises ScorerError if no completion could be scored."""
        if self._config.evaluation.by == "nodes":
            patience_s = PATIENCE_DEADLINES * self._config.leases.deadline_s
            measured = await self._by_nodes.measure(policy_version, patience_s=patience_s)
            if measured is not None:
                return measured
        sets = await asyncio.to_thread(HeldOut.of_run, self._config, self._problems, stop_ids=self._stop_ids)
        adapter = self._directory.adapter(policy_version) if policy_version else None
        generate = drawn_by(self._own, adapter)
        return await evaluate_sets(policy_version, sets, generate=generate, judge=scored_by(self._scoring))
