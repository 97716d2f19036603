"""Decide which versions are evaluated, and in which order."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

from echo_hub.config.sections import HubConfig
from echo_hub.run.directory import RunDirectory


def is_due(config: HubConfig, policy_version: int) -> bool:
    """Return True for the base, the run's last version, and every `evaluation.every`-th version."""
    every = config.evaluation.every
    return policy_version in (0, config.training.steps) or (every > 0 and policy_version % every == 0)


class DueVersions:
    """Queue of versions to evaluate. `first_version`, with which the run started, is always evaluated.

    After a restart of the hub, versions without a stored evaluation are queued again.
    """

    def __init__(
        self, config: HubConfig, directory: RunDirectory, *, done: Collection[int], first_version: int = 0
    ) -> None:
        """`done` holds the versions whose evaluations are in the store."""
        self._config = config
        self._directory = directory
        self._first_version = first_version
        self._queue: asyncio.Queue[int] = asyncio.Queue()
        self._done = set(done)
        self.waiting: set[int] = set()
        """Versions queued or under evaluation, whose adapters must be kept."""
        self._actions: dict[int, set[int]] = {}
        """Numbers of the operator's actions that wait for an evaluation, by version."""

    def reached(self, policy_version: int) -> None:
        """The learner has reached this version: queue all due versions up to it. Skip versions that are already queued
        or evaluated."""
        for version in sorted({0, *self._directory.adapter_versions()}):
            known = version in self._done or version in self.waiting
            is_wanted = version == self._first_version or is_due(self._config, version)
            if version <= policy_version and not known and is_wanted:
                self._add(version)

    def want(self, version: int | None, *, action: int) -> str:
        """Queue a version for an operator's action, due or not. If `version` is None, queue the newest version. Return
        "" after queueing, or the reason for the refusal."""
        if not self._config.trains:
            return "This run has no task of its own, so there are no problems to evaluate."
        there = [0, *self._directory.adapter_versions()]
        version = there[-1] if version is None else version
        if version in self._done:
            return f"Version {version} is already evaluated: repeating it would give the same result."
        if version not in there:
            return f"Version {version} has no adapter, or no longer has one."
        if version not in self.waiting:
            self._add(version)
        self._actions.setdefault(version, set()).add(action)
        return ""

    def _add(self, version: int) -> None:
        self.waiting.add(version)
        self._queue.put_nowait(version)

    async def next(self) -> int:
        """Wait for the next version and return it. Versions come in the order in which they were queued."""
        return await self._queue.get()

    def done(self, version: int) -> None:
        """Record that the version's evaluation is in the store."""
        self.waiting.discard(version)
        self._done.add(version)

    def take_actions(self, version: int) -> frozenset[int]:
        """Return and remove the numbers of the operator's actions that wait for the evaluation of this version."""
        return frozenset(self._actions.pop(version, ()))
