"""Outcomes of the newest rollouts by length, and the staleness of the newest batches.

A reading takes some hundredths of a second, so its result is cached for a few seconds and refreshed in the background.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from statistics import fmean
from typing import Final

from echo_hub.dashboard.model import LengthsView, WorkView
from echo_hub.spread.holdings import quantile
from echo_hub.store.recent_work import IN_FLIGHT, BatchAges, LengthCount, read_batch_ages, read_lengths
from echo_hub.store.store import Store
from echo_hub.views.beside import ReadBeside
from echo_shared.wire.messages import ReceiptState

READ_EVERY_S: Final = 10.0
ROLLOUTS_READ: Final = 5_000
STEPS_READ: Final = 32


class RecentWorkViews:
    """Caches views of recent work. `read` is thread-safe."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._views = ReadBeside(self._view, every_s=READ_EVERY_S, name="recent work")

    def read(self) -> WorkView:
        return self._views.newest()

    def _view(self) -> WorkView:
        return work_view(self._store.read(read_lengths, ROLLOUTS_READ), self._store.read(read_batch_ages, STEPS_READ))


def work_view(lengths: Iterable[LengthCount], ages: Iterable[BatchAges]) -> WorkView:
    """Return the view. Its outcomes are in this order: trained, in flight, then drop reasons, most frequent first."""
    by_outcome: dict[str, list[int]] = defaultdict(list)
    for length in lengths:
        by_outcome[length.outcome] += [length.num_tokens] * length.rollouts
    first = {ReceiptState.TRAINED.value: 0, IN_FLIGHT: 1}
    outcomes = sorted(by_outcome, key=lambda outcome: (first.get(outcome, 2), -len(by_outcome[outcome]), outcome))
    counted = list(ages)
    groups = Counter(staleness for batch in counted for staleness in batch.staleness)
    return WorkView(
        lengths=tuple(_lengths(outcome, sorted(by_outcome[outcome])) for outcome in outcomes),
        groups_by_staleness=dict(sorted(groups.items())),
        steps=len(counted),
    )


def _lengths(outcome: str, tokens: list[int]) -> LengthsView:
    """Return statistics of the lengths. `tokens` is ascending and not empty."""
    return LengthsView(
        outcome=outcome,
        rollouts=len(tokens),
        mean=fmean(tokens),
        p10=quantile(tokens, 0.1) or 0,
        p50=quantile(tokens, 0.5) or 0,
        p90=quantile(tokens, 0.9) or 0,
        longest=tokens[-1],
    )
