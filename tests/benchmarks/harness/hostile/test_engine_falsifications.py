"""Each kind of falsification, applied to an honest rollout, changes exactly what its name says."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks.harness.hostile.engine import (
    FALSIFICATIONS,
    REROLLS,
    TURNS_AFTER,
    Falsification,
    Problems,
)
from echo_hub.run.base_files import resolve_base
from echo_node.backends.base import EngineEvent, GroupFailed
from echo_shared.sampling.interface import FinishedRollout, GroupRequest
from echo_shared.wire.messages import FinishReason

BASE = Path(resolve_base("builtin:tiny"))
VOCABULARY = json.loads((BASE / "tokenizer.json").read_text())["model"]["vocab"]


def ids(text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array([VOCABULARY[letter] for letter in text], np.int32)


def request(prompt: str = "12+34=") -> GroupRequest:
    return GroupRequest(
        lease_id=7,
        group_id=2,
        indices=(0, 1),
        prompt_ids=ids(prompt),
        seed=5,
        policy_version=3,
        temperature=1.0,
        max_tokens=6,
        stop_ids=(1,),
    )


def rollout(text: str, *, index: int = 0) -> FinishedRollout:
    drawn = np.append(ids(text), np.int32(1))
    return FinishedRollout(
        lease_id=7,
        group_id=2,
        index=index,
        policy_version=3,
        completion_ids=drawn,
        behavior_logprobs=np.full(len(drawn), -0.5, np.float32),
        finish_reason=FinishReason.STOP,
        sampling_s=0.1,
    )


def opened(name: str, share: float = 1.0) -> Falsification:
    falsification = FALSIFICATIONS[name](share)
    falsification.problems = Problems(BASE)
    return falsification


def text(event: EngineEvent) -> str:
    assert isinstance(event, FinishedRollout) and event.completion_ids[-1] == 1
    return Problems(BASE).text(event.completion_ids[:-1])


def claims(event: EngineEvent) -> list[float]:
    assert isinstance(event, FinishedRollout)
    return [round(float(value), 3) for value in event.behavior_logprobs]


@pytest.mark.parametrize(
    ("name", "answer", "claimed"),
    [
        ("honest", "45", [-0.5] * 3),
        ("forged digits", "47", [-19.5, -0.1, -0.1]),
        ("forged digits, possible claims", "47", [-9.0, -0.1, -0.1]),
        ("hand-written answers", "46", [-0.1] * 3),
        ("claims of -10", "45", [-10.0] * 3),
        ("claims all lower", "45", [-0.8] * 3),
        ("claims all higher", "45", [-0.2] * 3),
        ("claims of failures", "45", [-3.5] * 3),
    ],
)
def test_each_falsification_of_one_rollout(name: str, answer: str, claimed: list[float]) -> None:
    (told,) = opened(name).told(rollout("45"), request(), 0)
    assert (text(told), claims(told)) == (answer, claimed)


def test_a_forged_answer_is_cut_at_the_token_limit() -> None:
    (told,) = opened("hand-written answers").told(rollout("45"), request("99999+9999999="), 0)
    assert isinstance(told, FinishedRollout)
    assert len(told.completion_ids) == 6 == len(told.behavior_logprobs) and told.finish_reason is FinishReason.LENGTH


def test_a_share_of_rollouts_is_falsified_and_no_more() -> None:
    some = opened("hand-written answers", 0.25)
    told = [text(one) for _ in range(40) for one in some.told(rollout("45"), request(), 0)]
    assert told.count("46") == 10 and told.count("45") == 30


def test_a_node_that_turns_hostile_is_honest_at_first() -> None:
    later = opened("hand-written later")
    told = [text(one) for _ in range(TURNS_AFTER + 2) for one in later.told(rollout("45"), request(), 0)]
    assert told == ["45"] * TURNS_AFTER + ["46"] * 2


def test_the_best_of_several_draws_is_reported() -> None:
    best = opened("re-rolled for reward")
    asked = best.asked(request())
    assert len({one.seed for one in asked}) == REROLLS == len(asked) and asked[0].seed == 5
    told = [best.told(rollout(drawn), request(), number) for number, drawn in enumerate(("45", "46", "44", "43"))]
    assert [len(each) for each in told] == [0, 0, 0, 1] and text(told[-1][0]) == "46"


def test_the_leased_sample_is_reported_unless_another_is_better() -> None:
    best = opened("re-rolled for reward")
    told = [best.told(rollout("4" + str(number)), request(), number) for number in (3, 2, 1, 0)]
    assert text(told[-1][0]) == "40"


def test_rewarded_rollouts_are_returned_as_failures() -> None:
    failures = opened("failures only")
    assert isinstance(failures.told(rollout("46"), request(), 0)[0], GroupFailed)
    assert text(failures.told(rollout("45"), request(), 0)[0]) == "45"


def test_a_copy_is_of_the_rollout_before() -> None:
    copied = opened("copied rollouts")
    assert [text(copied.told(rollout(drawn), request(), 0)[0]) for drawn in ("45", "46", "47")] == ["45", "45", "46"]


def test_falsified_requests_and_bases_of_the_engine(tmp_path: Path) -> None:
    assert opened("temperature 1.5").asked(request())[0].temperature == 1.5
    assert not opened("wrong version").has_policies and opened("honest").has_policies
    smaller = json.loads((opened("smaller model").base(BASE, tmp_path) / "config.json").read_text())
    assert smaller["num_hidden_layers"] == json.loads((BASE / "config.json").read_text())["num_hidden_layers"] - 1
