"""A run of several tasks, each with its own prompt text, reward bounds and held-out problems."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from echo_hub.config.file import load_config
from echo_hub.config.sections import HubConfig
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.problems import Problems
from echo_hub.scoring.task_problems import EnvironmentReply
from echo_hub.tasks.arithmetic import ArithmeticTask
from echo_hub.tasks.base import Problem
from echo_shared.errors import ConfigError


@pytest.fixture(scope="module")
def codec() -> PromptCodec:
    return PromptCodec.load(resolve_base("builtin:tiny"))


def config(**changed: Any) -> HubConfig:
    given = {
        "task": {
            "prompt_suffix": " ",
            "mixture": {
                "sums": {"name": "arithmetic", "weight": 3, "prompt_suffix": ""},
                "game": {"name": "environment:guess", "system_prompt": "Play"},
                "exam": {"name": "arithmetic", "weight": 0, "options": {"digits": 2}},
            },
        },
        "sampling": {"max_tokens": 1},
        "evaluation": {"problems": 3},
    }
    return load_config(None, {**given, **changed})


def test_every_task_has_its_own_words_scorer_and_held_out_set(codec: PromptCodec) -> None:
    mine = Problems.of_run(config(), codec)
    mine.prepare()
    assert mine.multi_turn, "one of the tasks may have several turns"
    by_task: dict[str, list[int]] = {}
    for group_id in range(40):
        by_task.setdefault(mine.task_of(group_id), []).append(group_id)
    assert sorted(by_task) == ["game", "sums"] and len(by_task["sums"]) > len(by_task["game"])
    prompts = {key: codec.text(mine.prompt_ids(ids[0])) for key, ids in by_task.items()}
    assert prompts["sums"].endswith("=") and prompts["game"].startswith("Play") and prompts["game"].endswith(" ")
    one = codec.encode_prompt("1")
    assert mine.respond(by_task["sums"][0], [one]) == 0.0
    assert isinstance(mine.respond(by_task["game"][0], [one]), (EnvironmentReply, float))
    texts = [codec.text(ids) for ids in mine.heldout_prompt_ids()]
    assert len(texts) == 9 and texts[:3] == [codec.text(ids) for ids in mine.heldout_prompt_ids(mine.sets[0])]
    assert [one.name for one in mine.sets] == ["sums", "game", "exam"]
    left, _, right = texts[7].rstrip(" =").partition("+")
    right_answer = codec.encode_prompt(str(int(left) + int(right)))
    assert mine.heldout_respond(7, [right_answer]) == 1.0 and mine.heldout_respond(6, [right_answer]) == 0.0


def test_a_tasks_groups_have_each_of_its_problems_as_if_it_were_alone(codec: PromptCodec) -> None:
    mixed = Problems.of_run(config(), codec)
    alone = Problems.of_run(config(task={"name": "arithmetic"}), codec)
    sums = [mixed.prompt_ids(group_id).tolist() for group_id in range(1_000) if mixed.task_of(group_id) == "sums"]
    assert sorted(sums) == sorted(alone.prompt_ids(group_id).tolist() for group_id in range(750))


def test_no_task_trains_on_anothers_held_out_problems(codec: PromptCodec) -> None:
    mixture = {
        "sums": {"name": "arithmetic", "options": {"digits": 1}},
        "exam": {"name": "arithmetic", "options": {"digits": 1}, "weight": 0},
    }
    sets = {"sums": {"problems": 5}, "exam": {"problems": 60}}
    mine = Problems.of_run(config(task={"mixture": mixture}, evaluation={"sets": sets}), codec)
    trained = {codec.text(mine.prompt_ids(group_id)) for group_id in range(300)}
    exam = {codec.text(ids) for ids in mine.heldout_prompt_ids(mine.sets[1])}
    assert len(exam) == 60 and len(trained) > 30 and not trained & exam


def test_a_set_of_fewer_problems_is_the_beginning_of_its_tasks_held_out_ones(codec: PromptCodec) -> None:
    sets = {"all": {"task": "sums", "problems": 4}, "few": {"task": "sums", "problems": 2}}
    mine = Problems.of_run(config(evaluation={"sets": sets}), codec)
    texts = [codec.text(ids) for ids in mine.heldout_prompt_ids()]
    assert texts[4:] == texts[:2] and len(set(texts)) == 4


def test_problems_of_a_file_come_once_an_epoch(codec: PromptCodec, tmp_path: Path) -> None:
    path = tmp_path / "problems.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": f"{n}=", "answer": n}) for n in range(20)))
    settings = {"task": {"name": "jsonl", "options": {"path": str(path)}}, "evaluation": {"problems": 4}}
    mine = Problems.of_run(load_config(None, settings), codec)
    heldout = {codec.text(ids) for ids in mine.heldout_prompt_ids()}
    epochs = [[codec.text(mine.prompt_ids(16 * epoch + at)) for at in range(16)] for epoch in range(3)]
    assert all(set(epoch) == {f"{n}=" for n in range(20)} - heldout for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3, "each in another order"
    again = Problems.of_run(load_config(None, settings), codec, held_out=mine.held_out)
    assert [codec.text(again.prompt_ids(at)) for at in range(16)] == epochs[0]
    anew = Problems.of_run(load_config(None, {**settings, "task": {**settings["task"], "draws": "replacement"}}), codec)
    assert len({codec.text(anew.prompt_ids(at)) for at in range(16)}) < 16


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"task": {"name": "jsonl", "mixture": {"a": {"name": "arithmetic"}}}}, "task.name and task.options must be"),
        ({"task": {"mixture": {"a": {"name": "arithmetic", "weight": 0}}}}, "must be more than 0"),
        ({"task": {"mixture": {"a b": {"name": "arithmetic"}}}}, "mixture"),
        ({"evaluation": {"sets": {"x": {"task": "y"}}}}, r"evaluation\.sets\.x\.task must be the key"),
        ({"evaluation": {"sets": {"x": {"weight": 0}}}}, "must be more than 0"),
        (
            {"evaluation": {"problems": 60_000, "sets": {"x": {"samples": 0}, "y": {"samples": 0}}}},
            "at most 100000 problems, not 120000",
        ),
    ],
)
def test_inconsistent_tasks_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, given)


def lines(path: Path, *prompts: str) -> HubConfig:
    text = "".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts)
    path.write_text(text, encoding="utf-8")
    given = {"task": {"name": "jsonl", "options": {"path": str(path)}}, "evaluation": {"problems": 1}}
    return load_config(None, {**given, "sampling": {"max_tokens": 8}})


def test_a_line_of_megabytes_is_passed_over_at_once(codec: PromptCodec, tmp_path: Path) -> None:
    began = time.process_time()
    given = Problems.of_run(lines(tmp_path / "long", "1+1=" * 2_500_000, "1+1=", "2+2="), codec)
    assert {codec.text(given.prompt_ids(group)) for group in range(20)} < {"1+1=", "2+2="}
    for prompts in (["1+1=" * 2_500_000, "?" * 9_000], ["1" * 3_000_000, " 1" * 3_000_000]):
        with pytest.raises(ConfigError, match="problems are too long"):
            Problems.of_run(lines(tmp_path / "only", *prompts), codec).prepare()
    assert time.process_time() - began < 10


@pytest.mark.parametrize("said", ["\ud83d", "1+1= \udc00", "\ude00\ud83d", "\ud800" * 50, "<eos>\udfff"])
def test_a_problem_that_is_no_text_is_skipped_and_reported(
    said: str, codec: PromptCodec, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task's code may return text that cannot be encoded, here for some seeds. The run must continue."""
    sample = ArithmeticTask.sample
    broken = lambda self, seed: Problem(prompt=said) if seed % 3 else sample(self, seed)  # noqa: E731
    monkeypatch.setattr(ArithmeticTask, "sample", broken)
    given = Problems.of_run(load_config(None, {"sampling": {"max_tokens": 8}, "evaluation": {"problems": 5}}), codec)
    given.prepare()
    assert all(codec.text(given.prompt_ids(group)).endswith("=") for group in range(20))
    told = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert "1 so far, the last: A text cannot be encoded for the model" in told[0]
    assert 1 < len(told) < 10, "the 1st, 2nd, 4th, 8th ..."
    monkeypatch.setattr(ArithmeticTask, "sample", lambda self, seed: Problem(prompt=said))
    with pytest.raises(ConfigError, match="cannot be encoded for the model"):
        Problems.of_run(load_config(None, {}), codec).prepare()
