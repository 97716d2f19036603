from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echo_hub.dashboard.answers import FED, STARVED, answers, fed, learning, well
from echo_hub.dashboard.curves import Trend
from echo_hub.dashboard.model import Doing
from echo_hub.dashboard.run_now import run_now
from echo_shared.records.node import TrustStatus

RISING = Trend(now=0.7, before=0.5, steps=12, direction="rising")


@pytest.mark.parametrize(
    ("trend", "verdict", "tone", "text"),
    [
        (None, "Not yet", "waiting", "No step is trained yet."),
        (RISING, "Yes, the reward rises", "good", "Mean reward 0.70; 12 steps before it was 0.50."),
        (replace(RISING, direction="steady"), "The reward is steady", "waiting", "Mean reward 0.70"),
        (replace(RISING, direction="falling"), "No, the reward falls", "bad", "Mean reward 0.70"),
        (replace(RISING, direction=""), "Too early to say", "waiting", "Mean reward 0.70 after 37 steps."),
    ],
)
async def test_the_verdict_on_learning(source: Any, trend: Trend | None, verdict: str, tone: str, text: str) -> None:
    answer = learning(await source.run_view(), trend)
    assert (answer.verdict, answer.tone) == (verdict, tone) and answer.text.startswith(text)
    assert answer.text.endswith("Held-out accuracy 87.7\u202f% ± 2.1\u202f%, the base model's 46.0\u202f%.")


async def test_accuracy_before_the_first_evaluation_and_of_the_base_alone(make_source: Any) -> None:
    run = await make_source(step=5).run_view()
    assert learning(run, RISING).text.endswith("Held-out accuracy of the base model 46.0\u202f%.")
    assert learning(replace(run, evaluations=()), RISING).text.endswith("No held-out accuracy yet.")


async def test_a_run_that_is_over_is_described_in_the_past(make_source: Any) -> None:
    run = await make_source(step=60).run_view()
    assert learning(run, RISING).verdict == "The reward rose to the end"
    assert learning(run, replace(RISING, direction="steady")).verdict == "The reward had settled"
    assert fed(run, run_now(run, ())).verdict == "The run is over"


@pytest.mark.parametrize(
    ("idle", "verdict"), [(0.0, "Yes"), (FED, "Yes"), (0.3, "Mostly"), (STARVED, "Mostly"), (0.9, "No, it starves")]
)
async def test_the_verdict_on_the_supply_of_rollouts(source: Any, idle: float, verdict: str) -> None:
    run = await source.run_view()
    capacity = replace(run.capacity, idle_share=idle, idle_by_reason={"hand_off": idle / 4, "rollouts": 3 * idle / 4})
    answer = fed(replace(run, capacity=capacity), run_now(run, ()))
    assert answer.verdict == verdict
    assert ("mostly waiting for rollouts" in answer.text) == (idle > 0)


async def test_a_learner_that_waits_for_nodes_lacks_rollouts(source: Any) -> None:
    run = await source.run_view()
    for doing in (Doing.LACKS_NODES, Doing.PAUSED, Doing.DRAINED, Doing.LEARNER_DOWN):
        waiting = replace(run, doing=doing)
        answer = fed(waiting, run_now(waiting, ()))
        assert answer.verdict == f"No: {run_now(waiting, ()).word}" and answer.tone != "good"
    assert fed(replace(run, capacity=None), run_now(run, ())).verdict == "Not known yet"


async def test_the_verdict_names_problems_and_missing_nodes(source: Any) -> None:
    run = await source.run_view()
    now = run_now(run, ())
    assert (well(run, now).verdict, well(run, now).tone) == ("Nothing", "good")
    assert well(replace(run, problems=("a",)), now).verdict == "1 problem, above"
    assert well(replace(run, problems=("a", "b")), now).tone == "bad"
    alone = replace(run, nodes_connected=1, trust=TrustStatus())
    assert "1 node connected. No rollout was checked yet." in well(alone, now).text
    assert well(replace(run, doing=Doing.LACKS_NODES), now).verdict == "It needs nodes"
    late = replace(run, as_of=run.as_of + 900.0)
    assert well(late, run_now(late, await source.steps(25))).verdict == "The run is stalled"


async def test_the_questions_come_in_their_order(source: Any) -> None:
    run = await source.run_view()
    assert [answer.key for answer in answers(run, run_now(run, ()), RISING)] == ["learning", "fed", "well"]
