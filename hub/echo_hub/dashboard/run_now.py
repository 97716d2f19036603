"""What the run does at this moment, in a word, and how long it still takes.

One word for one moment: a run that waits is never called running, and where nothing goes on there is no time to go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from echo_hub.dashboard.formats import duration
from echo_hub.dashboard.model import Doing, RunView
from echo_shared.books import StepRecord

Tone = Literal["good", "waiting", "bad", "over"]

STALLED: Final = "stalled"
STALLED_TIMES: Final = 3.0
"""Times the longest of the newest steps: an evaluation before a step is in that already."""
STALLED_S: Final = 60.0
"""Sooner, nothing is called stalled."""
LEAST_STEPS: Final = 3
"""Of fewer steps no pace is known."""

WORDS: Final[dict[Doing, tuple[str, Tone]]] = {
    Doing.STARTING: ("starting", "waiting"),
    Doing.LEARNER_DOWN: ("learner down", "bad"),
    Doing.PAUSED: ("paused", "waiting"),
    Doing.DRAINING: ("draining", "waiting"),
    Doing.DRAINED: ("drained", "waiting"),
    Doing.LACKS_NODES: ("waiting for nodes", "waiting"),
    Doing.COLLECTING: ("collecting rollouts", "good"),
    Doing.TRAINING: ("training", "good"),
    Doing.EVALUATING: ("evaluating", "good"),
    Doing.FINISHED: ("finished", "over"),
}
MOVING: Final = (Doing.COLLECTING, Doing.TRAINING)
"""What it does while steps follow each other."""
DETAILS: Final = {
    Doing.STARTING: "The learner loads the base model. Nodes may join; nothing is trained yet.",
    Doing.LEARNER_DOWN: "The learner has died and is started again from its newest checkpoint. Nodes go on sampling.",
    Doing.PAUSED: "Paused by the operator: nothing is leased. Resume it at Actions.",
    Doing.DRAINING: "Draining, as the operator said: what is open is leased to its end, nothing new is begun.",
    Doing.DRAINED: "Drained, as the operator said: nothing is under way. Resume it at Actions.",
    Doing.LACKS_NODES: "Nothing is sampled while no node is connected.",
    Doing.EVALUATING: "All steps are trained; the last version is measured.",
}
"""A sentence, where the word is not enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNow:
    """The headline."""

    word: str
    tone: Tone
    detail: str
    """A sentence or two, or nothing."""
    remaining_s: float | None
    """What the steps to come take at the pace of the recent ones; None where they do not follow each other now."""


def run_now(run: RunView, recent: Sequence[StepRecord]) -> RunNow:
    """`recent`: the newest trained steps, in order."""
    idle_s = stalled_s(run, recent)
    word, tone = WORDS[run.doing]
    detail = DETAILS.get(run.doing, "")
    if run.doing is Doing.LACKS_NODES and not run.nodes_known:
        detail = ""  # The page says how a first one joins.
    if idle_s is not None:
        word, tone = STALLED, "bad"
        longest = duration(_longest_s(recent))
        detail = (
            f"No step for {duration(idle_s)}, and none of the newest took longer than {longest}: look at what the "
            "nodes do, and at the log."
        )
    return RunNow(word=word, tone=tone, detail=detail, remaining_s=remaining_s(run, recent))


def remaining_s(run: RunView, recent: Sequence[StepRecord]) -> float | None:
    """What the steps to come take at the pace of the recent ones, waiting included; None while that says nothing."""
    if run.doing not in MOVING or len(recent) < LEAST_STEPS or stalled_s(run, recent) is not None:
        return None
    pace_s = (recent[-1].trained_at - recent[0].trained_at) / (len(recent) - 1)
    return pace_s * (run.steps_total - run.trained_step)


def stalled_s(run: RunView, recent: Sequence[StepRecord]) -> float | None:
    """Since when there was no step, if that is far longer than any of the recent ones took and nothing explains it."""
    if run.doing not in MOVING or len(recent) < LEAST_STEPS:
        return None
    idle_s = run.as_of - recent[-1].trained_at
    return idle_s if idle_s > max(STALLED_S, STALLED_TIMES * _longest_s(recent)) else None


def _longest_s(recent: Sequence[StepRecord]) -> float:
    return max(after.trained_at - before.trained_at for before, after in pairwise(recent))
