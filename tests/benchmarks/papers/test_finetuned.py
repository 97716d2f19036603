from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from benchmarks.papers.cases import smaller
from benchmarks.papers.finetuned import demonstrations
from benchmarks.papers.runs import Found, carry_out_all
from benchmarks.papers.small import DEMONSTRATED, KNIGHTS, TRAINED_KNIGHTS
from echo_hub.run.base_model import PromptCodec, resolve_base
from echo_hub.scoring.problems import Problems

SIZES = {
    "training": {"steps": 1, "groups_per_step": 1, "group_size": 2},
    "evaluation": {"problems": 3},
}


def problems() -> Problems:
    config = smaller(DEMONSTRATED, {"evaluation": {"problems": 32}}).config(0)
    return Problems.of_run(config, PromptCodec.load(resolve_base(config.model.base)))


def test_demonstrations_leave_out_held_out_problems_and_earn_full_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    given = problems()
    lines = list(demonstrations(given, 20, 7))
    assert len({line["prompt"] for line in lines}) == 20
    drawn = [given.codec.encode_prompt(lines[number]["prompt"]) for number in (0, 3)]
    monkeypatch.setattr(given, "heldout_prompt_ids", lambda: drawn)
    left = list(itertools.islice(demonstrations(given, 18, 7), 18))
    assert left == [line for number, line in enumerate(lines) if number not in (0, 3)]
    longest = max(len(given.codec.encode_reply(line["completion"])) for line in lines)
    assert longest < KNIGHTS["sampling"]["max_tokens"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_all_seeds_start_from_the_demonstrations_adapter() -> None:
    first = replace(smaller(DEMONSTRATED, SIZES), demonstrations=24)
    then = replace(smaller(TRAINED_KNIGHTS, SIZES), start=first)
    told: dict[int, Found] = {}
    carry_out_all([([first, then], 1)], 0, told.__setitem__)
    (warm,), (trained,) = told[0][first], told[0][then]
    assert len(warm.points) == 2 and warm.adapter and any(weight.any() for weight in warm.adapter.values())
    assert trained.points[0].accuracy == warm.accuracy
    assert trained.steps[0]["mean_reward"] >= 0 and trained.points[-1].trained_rollouts == 2
