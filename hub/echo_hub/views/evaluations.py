"""Views of evaluations: greedy and sampled figures of each version, thinned for charts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from echo_hub.dashboard.model import EvaluationView
from echo_hub.store.reports import read_evaluations
from echo_hub.store.store import Store
from echo_shared.records.run import Evaluation, EvaluationKind

EVALUATIONS_SHOWN: Final = 120


class EvaluationViews:
    """All evaluations as views. Each evaluation is read from the store only once. `read` is thread-safe."""

    def __init__(self, store: Store, sets: Sequence[str] = ()) -> None:
        """`sets` names the run's evaluation sets, if there are several."""
        self._store = store
        self._sets = sets
        self._known: dict[tuple[str, int, EvaluationKind], Evaluation] = {}

    def read(self) -> dict[str, list[EvaluationView]]:
        """Return all evaluations by the name of their set ("" = the run's own), each list in order of versions."""
        known = self._known
        since = max((row.evaluated_at for row in known.values()), default=0.0)
        known = known | {
            (row.name, row.policy_version, row.kind): row for row in self._store.read(read_evaluations, since)
        }
        self._known = known  # Replaced, never modified: another thread may be using it.
        found: dict[str, list[EvaluationView]] = {name: [] for name in ("", *self._sets)}
        for (name, version, kind), row in sorted(known.items()):
            if kind is EvaluationKind.GREEDY:
                sampled = known.get((name, version, EvaluationKind.SAMPLED))
                found.setdefault(name, []).append(_view(row, sampled))
        return found


def thinned(views: Sequence[EvaluationView], most: int) -> tuple[EvaluationView, ...]:
    """Return at most `most` views, evenly spaced. The first and the newest are always included."""
    every = -(-len(views) // (most - 1)) if len(views) > most else 1
    return tuple(view for place, view in enumerate(views) if place % every == 0 or place == len(views) - 1)


def _view(greedy: Evaluation, sampled: Evaluation | None) -> EvaluationView:
    if sampled is None:
        return EvaluationView(greedy=greedy, seconds=greedy.seconds)
    return EvaluationView(
        greedy=greedy,
        samples=sampled.samples,
        mean_at_k=sampled.accuracy,
        mean_at_k_error=sampled.accuracy_error,
        pass_at=sampled.pass_at,
        seconds=greedy.seconds + sampled.seconds,
    )
