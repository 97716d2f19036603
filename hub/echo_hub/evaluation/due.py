"""Decide which versions to evaluate, and when."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence

from echo_hub.config.sections import HubConfig
from echo_hub.run.directory import RunDirectory
from echo_shared.books import Evaluation

log = logging.getLogger(__name__)


def is_due(config: HubConfig, policy_version: int) -> bool:
    """Return True for the base, the run's last version, and versions at the configured interval."""
    every = config.evaluation.every
    return policy_version in (0, config.training.steps) or (every > 0 and policy_version % every == 0)


class Evaluations:
    """Evaluates due versions one at a time, lowest first. `first_version`, with which the run began, is due, too.

    After a restart, due versions without a stored evaluation are evaluated; stored ones never again.
    """

    def __init__(
        self,
        config: HubConfig,
        directory: RunDirectory,
        *,
        done: Collection[int],
        first_version: int = 0,
        measure: Callable[[int], Awaitable[Sequence[Evaluation]]],
        record: Callable[[Sequence[Evaluation]], Awaitable[None]],
    ) -> None:
        self._config = config
        self._directory = directory
        self._first_version = first_version
        self._measure = measure
        self._record = record
        self._queue: asyncio.Queue[int] = asyncio.Queue()
        self._done = set(done)
        self.waiting: set[int] = set()
        """Versions whose adapters are still needed."""

    def reached(self, policy_version: int) -> None:
        """Queue due versions up to this one, which the learner holds now."""
        for version in sorted({0, *self._directory.adapter_versions()}):
            known = version in self._done or version in self.waiting
            is_wanted = version == self._first_version or is_due(self._config, version)
            if version <= policy_version and not known and is_wanted:
                self.waiting.add(version)
                self._queue.put_nowait(version)

    def want(self, version: int | None) -> tuple[int, str]:
        """Queue a version, due or not; None means the newest. Return the version, and the reason if it is not
        evaluated."""
        there = [0, *self._directory.adapter_versions()]
        version = there[-1] if version is None else version
        if version in self._done:
            return version, f"Version {version} is already evaluated: repeating it would give the same result."
        if version not in there:
            return version, f"Version {version} has no adapter, or no longer has one."
        if version not in self.waiting:
            self.waiting.add(version)
            self._queue.put_nowait(version)
        return version, ""

    async def run(self) -> None:
        """Evaluate queued versions forever. Raises errors that make evaluation impossible."""
        while True:
            version = await self._queue.get()
            measured = await self._measure(version)
            await self._record(measured)
            self.waiting.discard(version)
            self._done.add(version)
            extra = {"event": "version_evaluated", "subject": str(version)}
            solved = "; ".join(evaluation.text for evaluation in measured)
            log.info("version %d solves %s", version, solved, extra=extra)
