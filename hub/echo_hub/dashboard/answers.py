"""Answer in words the three questions at the top of the operator's front page: does the run learn, does the learner get
enough rollouts, is anything wrong?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo_hub.dashboard.curves import Trend
from echo_hub.dashboard.formats import count, duration, fixed, percent
from echo_hub.dashboard.model import CapacityView, Doing, RunView
from echo_hub.dashboard.run_now import STALLED, RunNow, Tone

IDLE: Final = {
    "rollouts": "waiting for rollouts",
    "hand_off": "hand-off to the learner",
    "evaluation": "evaluation",
    "down": "learner down",
    "start": "start of the run",
}
"""Words for the reasons why the learner is idle. The keys are those of `CapacityView.idle_by_reason`."""
FED: Final = 0.1
"""Largest share of idle time at which the learner counts as fed (it gets enough rollouts). With small models, the
hand-off between hub and learner alone takes a few hundredths of the time.
"""
STARVED: Final = 0.4
"""Share of idle time above which the learner counts as starved (it gets far too few rollouts)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    key: str
    question: str
    verdict: str
    tone: Tone
    text: str
    """One or two sentences with the figures behind the verdict."""
    href: str
    """Address of the page section with the details."""
    more: str


def answers(run: RunView, now: RunNow, trend: Trend | None) -> tuple[Answer, ...]:
    """Return the answers to the three questions. A run without a task trains nothing, so only the last question gets an
    answer."""
    return (learning(run, trend), fed(run, now), well(run, now)) if run.trains else (well(run, now),)


def learning(run: RunView, trend: Trend | None) -> Answer:
    """Answer "is it learning?" by the trend of the reward. Add the held-out accuracy, now and at the start of
    the run."""
    accuracy = _accuracy(run)
    verdict: str
    tone: Tone
    if trend is None:
        verdict, tone, reward = "Not yet", "waiting", "No step is trained yet."
    else:
        reward = f"Mean reward {fixed(trend.now)}; {_steps(trend.steps)} before it was {fixed(trend.before)}."
        match trend.direction:
            case "rising":
                verdict, tone = "Yes, the reward rises", "good"
            case "falling":
                verdict, tone = "No, the reward falls", "bad"
            case "steady":
                verdict, tone = "The reward is steady", "good" if run.doing is Doing.FINISHED else "waiting"
            case _:
                verdict, tone = "Too early to say", "waiting"
                reward = f"Mean reward {fixed(trend.now)} after {_steps(run.trained_step)}."
        if run.doing is Doing.FINISHED:
            verdict = {"rising": "The reward rose to the end", "falling": "The reward fell at the end"}.get(
                trend.direction, "The reward had settled"
            )
    return Answer(
        key="learning",
        question="Is it learning?",
        verdict=verdict,
        tone=tone,
        text=f"{reward} {accuracy}",
        href="#learning",
        more="Learning",
    )


def _accuracy(run: RunView) -> str:
    if run.accuracy_before is None and run.accuracy_after is None:
        return "No held-out accuracy yet."
    if run.accuracy_after is None:
        return f"Held-out accuracy of {run.beginning} {percent(run.accuracy_before)}."
    newest = run.evaluations[-1].greedy
    base = "" if run.accuracy_before is None else f", {run.beginning}'s {percent(run.accuracy_before)}"
    return f"Held-out accuracy {percent(run.accuracy_after)} ± {percent(newest.accuracy_error)}{base}."


def fed(run: RunView, now: RunNow) -> Answer:
    """Answer "is it fed?" (does the learner get enough rollouts?) by the learner's share of idle time, or by what the
    run waits for now."""
    capacity = run.capacity
    verdict: str
    tone: Tone
    if run.doing is Doing.FINISHED:
        verdict, tone = "The run is over", "over"
    elif run.doing in (Doing.LACKS_NODES, Doing.PAUSED, Doing.DRAINED, Doing.LEARNER_DOWN) or now.word == STALLED:
        verdict, tone = f"No: {now.word}", now.tone
    elif capacity is None:
        verdict, tone = "Not known yet", "waiting"
    elif capacity.idle_share <= FED:
        verdict, tone = "Yes", "good"
    elif capacity.idle_share <= STARVED:
        verdict, tone = "Mostly", "waiting"
    else:
        verdict, tone = "No, it starves", "bad"
    text = "Known after the first step." if capacity is None else _idle(capacity)
    return Answer(
        key="fed",
        question="Is it fed?",
        verdict=verdict,
        tone=tone,
        text=text,
        href="#capacity-section",
        more="What would help",
    )


def _idle(capacity: CapacityView) -> str:
    over = f"The learner was idle for {percent(capacity.idle_share, 0)} of the last {duration(capacity.window_s)}"
    shares = {reason: share for reason, share in capacity.idle_by_reason.items() if share > 0}
    if not shares:
        return f"{over}."
    reason = max(shares, key=lambda name: shares[name])
    return f"{over}, mostly {IDLE[reason]} ({percent(shares[reason], 0)})."


def well(run: RunView, now: RunNow) -> Answer:
    """Answer "is anything wrong?" by the current problems, and by steps that have stalled. Add the number of connected
    nodes and of checked rollouts."""
    trust = run.trust
    checks, failed = sum(trust.checks.values()), sum(trust.failed_checks.values())
    text = f"{_nodes(run.nodes_connected)} connected. "
    text += f"{count(checks)} checks, {count(failed)} failed" if checks else "No rollout was checked yet"
    text += f", {count(trust.quarantined)} in quarantine." if trust.quarantined else "."
    number = len(run.problems)
    verdict: str
    tone: Tone
    if number:
        verdict, tone = "1 problem, above" if number == 1 else f"{number} problems, above", "bad"
    elif now.word == STALLED:
        verdict, tone = "The run is stalled", "bad"
    elif run.doing is Doing.LACKS_NODES:
        verdict, tone = "It needs nodes", "waiting"
    else:
        verdict, tone = "Nothing", "good"
    return Answer(
        key="well",
        question="Is anything wrong?",
        verdict=verdict,
        tone=tone,
        text=f"{text} The hub is {run.health.state}.",
        href="#trust-section",
        more="Trust",
    )


def _nodes(number: int) -> str:
    return "1 node" if number == 1 else f"{count(number)} nodes"


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{count(number)} steps"
