from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.evaluation.by_hub import Episode, HeldOut
from echo_hub.evaluation.examples import AnswerExample, ChoosingExamples, transcript
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.tasks.rewards import RewardBounds
from echo_shared.records.run import EvaluationKind

CONFIG = HubConfig.model_validate({"evaluation": {"problems": 8}})
CODEC = PromptCodec.of_run(CONFIG, resolve_base(CONFIG.model.base))
PROBLEMS = Problems.of_run(CONFIG, CODEC)
HELDOUT = HeldOut(
    prompts=PROBLEMS.heldout_prompt_ids(),
    run_seed=0,
    samples=2,
    temperature=1.0,
    max_tokens=4,
    stop_ids=CODEC.stop_ids,
    rewards=RewardBounds(),
)


def chosen(rewards: list[float | None], kind: EvaluationKind = EvaluationKind.GREEDY) -> list[AnswerExample]:
    episodes = [
        Episode(number=number, index=0, prompt_ids=prompt, turns=[CODEC.encode_reply(str(number))], reward=reward)
        for number, (prompt, reward) in enumerate(zip(HELDOUT.prompts, rewards, strict=False))
    ]
    found: list[AnswerExample] = []
    ChoosingExamples(3, PROBLEMS, found).finished(HELDOUT, kind, episodes)
    return found


@pytest.mark.parametrize(
    ("rewards", "places"),
    [
        ([0, 0, 0, 0, 1, 1], [0, 1, 4]),
        ([1, 1, 1, 1, None, 0], [0, 1, 4]),
        ([1, 1, 1, 1], [0, 1, 2]),
        ([0], [0]),
        ([], []),
    ],
)
def test_examples_include_a_solved_and_an_unsolved_rollout(rewards: list[float | None], places: list[int]) -> None:
    found = chosen(rewards)
    assert [example.completion for example in found] == [str(place) for place in places]
    assert [example.prompt for example in found] == [PROBLEMS.heldout_problem(place)[0].prompt for place in places]
    assert [example.is_solved for example in found] == [rewards[place] == 1 for place in places]


def test_drawn_answers_are_no_examples() -> None:
    assert chosen([0, 1], EvaluationKind.SAMPLED) == []


def test_a_set_and_a_version_are_named() -> None:
    found: list[AnswerExample] = []
    episode = Episode(number=0, index=0, prompt_ids=HELDOUT.prompts[0], turns=[CODEC.encode_reply("1")], error="broken")
    ChoosingExamples(3, PROBLEMS, found).finished(replace(HELDOUT, name="hard"), EvaluationKind.GREEDY, [episode])
    assert [(one.policy_version, one.name, one.reward, one.error) for one in found] == [(3, "hard", None, "broken")]


def test_an_episode_is_shown_turn_by_turn() -> None:
    def ids(text: str) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
        return CODEC.encode_prompt(text)

    episode = Episode(number=0, index=0, prompt_ids=ids("1"), turns=[ids("12"), ids("3")], observations=[ids("45")])
    assert transcript(episode, CODEC) == "12\n[answered: 45]\n3"
