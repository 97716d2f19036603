"""Evaluation on nodes: the coordinator leases the held-out problems, and the figures are computed from the store.

An evaluation survives restarts of hub and nodes, and waits for nodes as training does. If no more rollouts arrive after
the run's last version, the hub stops waiting and evaluates that version itself.

A greedy completion is the limit of sampling as the temperature approaches 0, so engines sample it like any other
completion, at a tiny temperature. At `GREEDY_TEMPERATURE`, two different float32 logits of size 1 or more get sampling
weights whose ratio is at most e^-59. The draws, in float64 on every engine, do not overflow. Only tokens with exactly
equal logits can both be drawn, and each of them is a greedy choice.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, Protocol

from echo_hub.config.task_sections import ChosenSet
from echo_hub.core.accounting.events import EvaluationAbandoned, EvaluationWanted
from echo_hub.driving.event_queue import EventQueue
from echo_hub.driving.progress import RunProgress
from echo_hub.evaluation.figures import Attempt, summary, with_headline
from echo_hub.net.live_nodes import LiveNodes
from echo_hub.store.async_store import AsyncStore
from echo_hub.store.reading import EvaluatedEpisode, read_evaluated
from echo_hub.tasks.rewards import RewardBounds
from echo_shared.errors import ScorerError
from echo_shared.records.run import Evaluation, EvaluationKind

log = logging.getLogger(__name__)

GREEDY_TEMPERATURE: Final = 1e-9
LOOK_S: Final = 5.0
"""After the run's last version: seconds between two checks whether nodes still return rollouts."""
PATIENCE_DEADLINES: Final = 2
"""Longest wait for a rollout after the last version, as a multiple of the lease deadline. After this wait the hub
evaluates the version itself, even if nodes are connected."""


class Keeps(Protocol):
    """Keeps a version available to nodes while they evaluate it. Implemented by `echo_hub.distribution.publishing`."""

    async def keep_for_evaluation(self, policy_version: int) -> None: ...


class NodeEvaluations:
    """Evaluations by nodes. `sets` are the run's evaluation sets, each with the bounds of its rewards."""

    def __init__(
        self,
        *,
        sets: Mapping[ChosenSet, RewardBounds],
        queue: EventQueue,
        publishing: Keeps,
        store: AsyncStore,
        progress: RunProgress,
        live: LiveNodes,
    ) -> None:
        self._sets = sets
        self._queue = queue
        self._publishing = publishing
        self._store = store
        self._progress = progress
        self._live = live
        self._done: dict[int, asyncio.Event] = {}

    def done(self, policy_version: int) -> None:
        """Record that all rollouts of this version's evaluation have arrived and have verdicts."""
        if policy_version in self._done:
            self._done[policy_version].set()

    async def measure(self, policy_version: int, *, patience_s: float) -> list[Evaluation] | None:
        """Return the figures of every set and kind. The result None means that the hub must evaluate the version
        itself.

        There are two such cases: the nodes will not finish, or no completion could be scored. In the second case, the
        hub scores completions of its own, because the operator may have fixed the scorer. `patience_s` is the longest
        wait for a rollout after the run's last version.
        """
        done = self._done[policy_version] = asyncio.Event()
        try:
            await self._publishing.keep_for_evaluation(policy_version)
            await self._queue.put(EvaluationWanted(policy_version=policy_version))
            if not await self._finished(done, patience_s):
                log.warning("no node evaluates version %d any more: the hub evaluates it", policy_version)
                await self._queue.put(EvaluationAbandoned(policy_version=policy_version))
                return None
            return of_sets(policy_version, await self._store.read(read_evaluated, policy_version), self._sets)
        except ScorerError as error:
            log.warning("version %d is evaluated again, by the hub: %s", policy_version, error)
            return None
        finally:
            del self._done[policy_version]

    async def _finished(self, done: asyncio.Event, patience_s: float) -> bool:
        received, heard_at = self._progress.num_received, time.monotonic()
        while True:
            try:
                async with asyncio.timeout(LOOK_S):
                    await done.wait()
                return True
            except TimeoutError:
                now = time.monotonic()
                if self._progress.num_received != received or not self._progress.last_is_published:
                    received, heard_at = self._progress.num_received, now
                elif not self._live or now - heard_at > patience_s:
                    return False


def of_sets(
    policy_version: int, episodes: Sequence[EvaluatedEpisode], sets: Mapping[ChosenSet, RewardBounds]
) -> list[Evaluation]:
    """Return the figures of every set, computed as for the hub's own evaluations.

    Raises ScorerError if no completion of a set could be scored.
    """
    measured: list[Evaluation] = []
    for chosen, rewards in sets.items():
        of_set = [one for one in episodes if one.about.number in chosen.numbers]
        measured += figures(policy_version, of_set, rewards=rewards, name=chosen.name)
    return with_headline(measured, {chosen.name: chosen.weight for chosen in sets})


def figures(
    policy_version: int, episodes: Sequence[EvaluatedEpisode], *, rewards: RewardBounds, name: str = ""
) -> list[Evaluation]:
    """Return the figures of one set, computed as for the hub's own evaluations.

    Raises ScorerError if no completion could be scored. A stored reward outside the bounds counts as not scored: the
    task's code may have changed between two starts of the hub.
    """
    results = []
    for kind in EvaluationKind:
        of_kind = [one for one in episodes if one.about.greedy == (kind is EvaluationKind.GREEDY)]
        if of_kind:
            attempts = [
                Attempt(
                    number=one.about.number,
                    num_tokens=one.num_tokens,
                    truncated=one.truncated,
                    reward=None if one.reward is None or not rewards.hold(one.reward) else one.reward,
                )
                for one in of_kind
            ]
            samples = max(Counter(attempt.number for attempt in attempts).values())
            seconds = max(one.received_at for one in of_kind) - min(one.leased_at for one in of_kind)
            measured = summary(
                attempts, policy_version, kind, samples=samples, seconds=seconds, rewards=rewards, name=name
            )
            results.append(measured)
    return results
