"""Episodes played by hand, on real environments in scoring processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from echo_hub.config.sections import HubConfig
from echo_hub.evaluation.base_answers import trial_judge
from echo_hub.evaluation.by_hand import (
    HandGenerator,
    ListedReplies,
    PlayedByHand,
    RepliesEnded,
    ReplySource,
    play_by_hand,
    replies_of_file,
)
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.tasks.stream import HeldOutProblems
from echo_shared.errors import ConfigError
from echo_shared.sampling.interface import GroupRequest
from echo_shared.wire.messages import FinishReason

BASE = resolve_base("builtin:small")


async def played(source: ReplySource, tmp_path: Path) -> PlayedByHand:
    config = HubConfig.model_validate(
        {
            "model": {"base": "builtin:small"},
            "task": {"name": "environment:sokoban", "scorer_processes": 1},
            "sampling": {"max_tokens": 32},
        }
    )
    codec = PromptCodec.of_run(config, BASE)
    problems = Problems.of_run(config, codec, held_out={"": HeldOutProblems(prompts=())})
    async with ScoringPool.open(config, problems, base_dir=BASE, logs=tmp_path) as pool:
        return await play_by_hand(config, problems, source=source, judge=trial_judge(pool))


async def test_a_game_is_played_to_its_end_with_what_was_seen(tmp_path: Path) -> None:
    codec, seen = PromptCodec.load(BASE), list[str]()

    class Seeing:
        def reply(self, request: GroupRequest) -> str:
            seen.append(codec.text(request.prompt_ids))
            return "U" if len(seen) < 3 else "DLR"

    game = await played(Seeing(), tmp_path)
    assert game.has_ended and len(game.turns) == len(seen) == 4, "Sokoban has four rounds"
    assert [turn.reply for turn in game.turns] == ["U", "U", "DLR", "DLR"]
    assert seen[0] == game.prompt and seen[1].startswith(game.prompt) and len(seen[1]) > len(seen[0])
    assert all("#" in turn.messages[0].text for turn in game.turns[:3]) and game.turns[3].messages == ()
    assert game.reward is not None and sum(turn.reward or 0.0 for turn in game.turns) == pytest.approx(game.reward)


async def test_a_game_without_enough_replies_is_shown_as_far_as_it_was_played(tmp_path: Path) -> None:
    game = await played(ListedReplies(["U", "D"]), tmp_path)
    assert not game.has_ended and game.reward is None and not game.is_solved
    assert [turn.reply for turn in game.turns] == ["U", "D"] and game.turns[1].messages


def request(max_tokens: int) -> GroupRequest:
    return GroupRequest(
        lease_id=1,
        group_id=7,
        indices=(0,),
        prompt_ids=np.array([1], np.int32),
        seed=0,
        policy_version=0,
        temperature=1.0,
        max_tokens=max_tokens,
        stop_ids=(0,),
    )


async def test_a_long_reply_is_cut_as_a_node_cuts_it() -> None:
    codec = PromptCodec.load(BASE)
    generate = HandGenerator(codec=codec, source=ListedReplies(["UDLR", "UDLR"]))
    (whole,) = (await generate([request(64)], greedy=False)).rollouts
    (cut,) = (await generate([request(3)], greedy=False)).rollouts
    assert (whole.finish_reason, whole.completion_ids[-1]) == (FinishReason.STOP, codec.end_of_reply)
    assert (cut.finish_reason, cut.completion_ids.tolist()) == (FinishReason.LENGTH, whole.completion_ids[:3].tolist())
    with pytest.raises(RepliesEnded):
        await generate([request(64)], greedy=False)


def test_replies_of_a_file_are_lines_or_a_json_list(tmp_path: Path) -> None:
    lines, listed = tmp_path / "r.txt", tmp_path / "r.json"
    lines.write_text("U\n\nLR\n")
    listed.write_text('["two\\nlines", "x"]')
    assert replies_of_file(lines) == ["U", "", "LR"] and replies_of_file(listed) == ["two\nlines", "x"]


@pytest.mark.parametrize(
    ("name", "text"), [("r.json", "["), ("r.json", '{"a": 1}'), ("r.json", "[1]"), ("no.txt", None)]
)
def test_a_wrong_file_of_replies_is_refused(tmp_path: Path, name: str, text: str | None) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match="file of replies"):
        replies_of_file(tmp_path / name)
