"""The run's current state in one word, and the remaining time.

A run that waits is never shown as running. The remaining time is unknown while no steps are trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from echo_hub.dashboard.formats import duration
from echo_hub.dashboard.model import Doing, RunView
from echo_shared.records.run import StepRecord

Tone = Literal["good", "waiting", "bad", "over"]

STALLED: Final = "stalled"
STALLED_TIMES: Final = 3.0
"""A run counts as stalled if its newest step is older than this multiple of the longest recent step. An evaluation
before a step counts as part of that step's time.
"""
STALLED_S: Final = 60.0
"""A run whose newest step is younger than this many seconds is never called stalled."""
LEAST_STEPS: Final = 3
"""Number of recent steps needed to estimate the time of a step."""

WORDS: Final[dict[Doing, tuple[str, Tone]]] = {
    Doing.STARTING: ("starting", "waiting"),
    Doing.LEARNER_DOWN: ("learner down", "bad"),
    Doing.PAUSED: ("paused", "waiting"),
    Doing.DRAINING: ("draining", "waiting"),
    Doing.DRAINED: ("drained", "waiting"),
    Doing.LACKS_NODES: ("waiting for nodes", "waiting"),
    Doing.COLLECTING: ("collecting rollouts", "good"),
    Doing.TRAINING: ("training", "good"),
    Doing.SERVING: ("working for tenants", "good"),
    Doing.EVALUATING: ("evaluating", "good"),
    Doing.FINISHED: ("finished", "over"),
}
MOVING: Final = (Doing.COLLECTING, Doing.TRAINING)
"""Activities during which one step should follow another without a long pause."""
DETAILS: Final = {
    Doing.STARTING: "The learner loads the base model. Nodes may join; nothing is trained yet.",
    Doing.LEARNER_DOWN: "The learner stopped and restarts from its newest checkpoint. Nodes continue to sample.",
    Doing.PAUSED: "Paused by the operator: nothing is leased. Resume it at Actions.",
    Doing.DRAINING: "Draining by the operator: open groups are finished, and no new ones begin.",
    Doing.DRAINED: "Drained by the operator: no work is open. Resume it at Actions.",
    Doing.LACKS_NODES: "Nothing is sampled while no node is connected.",
    Doing.SERVING: "The run has no task of its own: it samples and trains for the programs of its tenants.",
    Doing.EVALUATING: "All steps are trained; the last version is being evaluated.",
}
"""One sentence for each state whose word alone is unclear."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNow:
    """The headline of the run: its state in one word, with details."""

    word: str
    tone: Tone
    detail: str
    """One or two sentences that explain the state; "" if the word is enough."""
    remaining_s: float | None
    """Estimated time of the remaining steps at the recent pace, in seconds. None while no steps are trained, or while
    they pause."""


def run_now(run: RunView, recent: Sequence[StepRecord]) -> RunNow:
    """Return the headline. `recent` holds the newest trained steps, in order."""
    idle_s = stalled_s(run, recent)
    word, tone = WORDS[run.doing]
    detail = DETAILS.get(run.doing, "")
    if run.doing is Doing.LACKS_NODES and not run.nodes_known:
        detail = ""  # The page itself explains how the first node joins.
    if idle_s is not None:
        word, tone = STALLED, "bad"
        longest = duration(_longest_s(recent))
        detail = (
            f"No step for {duration(idle_s)}; recent steps took at most {longest}. Check the nodes' states and the log."
        )
    return RunNow(word=word, tone=tone, detail=detail, remaining_s=remaining_s(run, recent))


def remaining_s(run: RunView, recent: Sequence[StepRecord]) -> float | None:
    """Return the seconds that the remaining steps take at the recent pace, waits included. Return None if steps do not
    follow each other steadily now.
    """
    if run.doing not in MOVING or len(recent) < LEAST_STEPS or stalled_s(run, recent) is not None:
        return None
    pace_s = (recent[-1].trained_at - recent[0].trained_at) / (len(recent) - 1)
    return pace_s * (run.steps_total - run.trained_step)


def stalled_s(run: RunView, recent: Sequence[StepRecord]) -> float | None:
    """Return the seconds since the newest step if the run has stalled, else None. A run has stalled if steps should
    follow each other, but the newest one is far older than the longest recent step."""
    if run.doing not in MOVING or len(recent) < LEAST_STEPS:
        return None
    idle_s = run.as_of - recent[-1].trained_at
    return idle_s if idle_s > max(STALLED_S, STALLED_TIMES * _longest_s(recent)) else None


def _longest_s(recent: Sequence[StepRecord]) -> float:
    return max(after.trained_at - before.trained_at for before, after in pairwise(recent))
