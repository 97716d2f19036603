"""Figures and warnings of a base model's trial before a run. Completions are scripted; problems, prompts and scoring
processes are real.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.evaluation.base_answers import BaseAnswers, base_answers, trial_judge, verdict
from echo_hub.evaluation.by_hub import Generated
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.tasks.stream import HeldOutProblems
from echo_shared.errors import ScorerError
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.wire.messages import FinishReason

BASE = resolve_base("builtin:small")
OWN = """
from echo_hub.tasks.base import Problem

class Strict:
    name = "strict"

    def sample(self, seed):
        return Problem(prompt="2+3=", metadata={"answer": "5"})

    def score(self, problem, completion):
        if completion == "9":
            raise ValueError("no nines")
        return float(completion == "5")

def make(options):
    return Strict()
"""


@pytest.fixture
def strict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    (tmp_path / "strict_task.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.syspath_prepend(tmp_path)
    return {
        "model": {"base": "builtin:small"},
        "task": {"name": "python:strict_task:make", "scorer_processes": 1},
        "training": {"group_size": 4},
        "sampling": {"max_tokens": 7},
    }


async def answered(settings: dict[str, Any], tmp_path: Path, *groups: Sequence[str]) -> BaseAnswers:
    """Return the result of `base_answers` for a base model that answers with these texts. A text that ends in `…`
    counts as truncated."""
    config = HubConfig.model_validate(settings)
    codec = PromptCodec.of_run(config, BASE)
    problems = Problems.of_run(config, codec, held_out={"": HeldOutProblems(prompts=())})

    async def generate(requests: Sequence[GroupRequest], *, greedy: bool) -> Generated:
        assert not greedy and {len(request.indices) for request in requests} == {4}
        assert {request.max_tokens for request in requests} == {7}
        rollouts = []
        for request in requests:
            assert list(request.prompt_ids) == list(problems.prompt_ids(request.group_id))
            for index, text in enumerate(groups[request.group_id]):
                is_cut = text.endswith("…")
                ids = codec.encode_reply(text.rstrip("…"))[: -1 if is_cut else None]
                rollouts.append(
                    FinishedRollout(
                        lease_id=request.lease_id,
                        group_id=request.group_id,
                        index=index,
                        policy_version=0,
                        completion_ids=ids,
                        behavior_logprobs=np.zeros(len(ids), np.float32),
                        finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
                        sampling_s=0.0,
                    )
                )
        return Generated(rollouts=rollouts, seconds=2.0)

    async with ScoringPool.open(config, problems, base_dir=BASE, logs=tmp_path) as pool:
        judge = trial_judge(pool)
        return await base_answers(config, problems, pool=pool, judge=judge, generate=generate, count=len(groups))


async def test_every_figure_by_hand(strict: dict[str, Any], tmp_path: Path) -> None:
    found = await answered(strict, tmp_path, ["5", "4", "4", "4"], ["5", "5", "9", "5"])
    assert (found.num_scored, found.num_solved, found.num_mixed) == (7, 4, 1)
    assert found.solved_rate == pytest.approx((0.25 + 1.0) / 2), (
        "a mean by problem; rollouts without a reward are left out"
    )
    assert found.solved_error == pytest.approx(0.375), "half the difference of the two"
    assert found.mean_reward == pytest.approx(4 / 7)
    assert [problem.is_mixed for problem in found.problems] == [True, False]
    assert found.problems[0].answers[0].text == "5" and found.problems[0].reference == "5"
    assert found.verdict.startswith("Some training signal"), "63 %"
    (warning,) = found.warnings
    assert "failed on 1 completions" in warning and "no nines" in warning


async def test_right_answers_in_an_unpaid_form_are_warned_of(strict: dict[str, Any], tmp_path: Path) -> None:
    found = await answered(strict, tmp_path, ["2+3=5", "4", "4", "2+3=4"])
    assert [answer.paid_as for answer in found.problems[0].answers] == ["5", "", "", ""]
    (warning,) = found.warnings
    assert "1 of 4 completions contain the right answer in a form that is not rewarded" in warning and '"5"' in warning
    assert found.verdict.startswith("Nothing to reinforce")


async def test_answers_that_are_cut_off_are_warned_of(strict: dict[str, Any], tmp_path: Path) -> None:
    found = await answered(strict, tmp_path, ["4…", "5", "4", "5"])
    assert [answer.is_cut for answer in found.problems[0].answers] == [True, False, False, False]
    (warning,) = found.warnings
    assert "sampling.max_tokens = 7" in warning
    assert found.verdict.startswith("Good")


async def test_an_error_if_no_answer_can_be_scored(strict: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ScorerError, match="no nines"):
        await answered(strict, tmp_path, ["9", "9", "9", "9"])


@pytest.mark.parametrize(
    ("solved", "mixed", "said"),
    [
        (0.0, 0.0, "Nothing to reinforce: none of 64 completions is solved"),
        (0.0, 0.1, "Little training signal: few are solved, and 90%"),
        (0.0, 0.5, "Some training signal: few completions are solved, but rewards differ within 50%"),
        (0.3, 0.0, "No training signal: every group"),
        (0.3, 0.1, "Little training signal: groups agree"),
        (0.3, 0.7, "Good"),
        (0.6, 0.21, "Good"),
        (0.9, 0.1, "Little training signal: most are solved"),
        (0.9, 0.4, "Some training signal, but little is left"),
        (1.0, 0.0, "Nothing to learn"),
        (1.0, 0.5, "Nothing to learn"),
    ],
)
def test_the_verdict_goes_by_the_rate_and_by_unlike_groups(solved: float, mixed: float, said: str) -> None:
    assert verdict(solved, mixed, num_scored=64).startswith(said)
