from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from benchmarks.papers.runs import COLOCATED, SEQUENTIAL, carry_out, demonstrations, runs_of
from benchmarks.papers.tables import DEMONSTRATED, FAR, KNIGHTS
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from tests.benchmarks.papers.toy import ran, smaller


def test_a_tables_runs_go_seed_by_seed_and_an_untrained_base_has_one() -> None:
    untrained = replace(COLOCATED, runner="untrained")
    assert runs_of(([COLOCATED, untrained, SEQUENTIAL], 2)) == [
        (COLOCATED, 0),
        (untrained, 0),
        (SEQUENTIAL, 0),
        (COLOCATED, 1),
        (SEQUENTIAL, 1),
    ]


def test_steps_to_a_target_lie_between_two_points() -> None:
    run = ran(0.2, 0.4, 0.8, 0.6)
    assert run.steps_to(0.6, evaluate_every=10) == pytest.approx(15)
    assert run.steps_to(0.1, evaluate_every=10) == 0
    assert run.steps_to(0.9, evaluate_every=10) == float("inf")
    assert run.accuracy == 0.6


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_sequential_equals_colocated_and_far_nodes_train_as_much() -> None:
    colocated, sequential = (carry_out(smaller(case, steps=2), 1) for case in (COLOCATED, SEQUENTIAL))
    assert sequential.points == colocated.points
    assert [point.trained_rollouts for point in colocated.points] == [0, 4, 8]
    assert all("grad_norm" in step for step in colocated.steps) and len(colocated.steps) == 2
    assert carry_out(smaller(FAR[300], steps=2), 1).points[-1].trained_rollouts == 8


def test_no_held_out_problem_is_demonstrated(monkeypatch: pytest.MonkeyPatch) -> None:
    config = smaller(DEMONSTRATED, {"evaluation": {"problems": 32}, "training": {}}).config(0)
    given = Problems.of_run(config, PromptCodec.load(resolve_base(config.model.base)))
    lines = list(demonstrations(given, 20, 7))
    assert len({line["prompt"] for line in lines}) == 20
    drawn = [given.codec.encode_prompt(lines[number]["prompt"]) for number in (0, 3)]
    monkeypatch.setattr(given, "heldout_prompt_ids", lambda: drawn)
    left = list(itertools.islice(demonstrations(given, 18, 7), 18))
    assert left == [line for number, line in enumerate(lines) if number not in (0, 3)]
    longest = max(len(given.codec.encode_reply(line["completion"])) for line in lines)
    assert longest < KNIGHTS["sampling"]["max_tokens"]
