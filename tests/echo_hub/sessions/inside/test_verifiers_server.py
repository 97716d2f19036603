"""Episodes of a real verifiers environment with a tool, by the adapter in verifiers' own interpreter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from echo_hub.sessions.inside.verifiers_server import TRACES_BYTES, VerifiersServer
from tests.verifiers_env import DemoEnvironment, make_demo_environment, play

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> DemoEnvironment:
    return make_demo_environment(tmp_path_factory.mktemp("verifiers"))


@pytest.fixture(scope="module")
def shown(demo: DemoEnvironment, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    meanwhile = ("with_tool", "cut", "closed", "branch", "posted_twice")
    return play(demo, tmp_path_factory.mktemp("play"), "killed", meanwhile=meanwhile)


class Record:
    def to_record(self, **_: object) -> dict[str, Any]:
        return {"traces": []}


def test_saved_records_have_a_limit_and_cost_no_episode(tmp_path: Path) -> None:
    place = {"directory": str(tmp_path), "stop_ids": [], "max_tokens": 8, "temperature": 1.0}
    server = VerifiersServer({"bounds": [0.0, 1.0]}, place, {})
    file = tmp_path / "traces.jsonl"
    with file.open("wb") as full:
        full.truncate(TRACES_BYTES + 1)
    server._save(Record())
    server._save(Record())
    assert file.read_text() == '{"traces": []}\n' * 2
    assert (tmp_path / "traces.old.jsonl").stat().st_size > TRACES_BYTES
    file.unlink()
    file.mkdir()
    server._save(Record())


def test_the_trace_is_what_the_hub_has_drawn(shown: dict[str, Any]) -> None:
    told = shown["with_tool"]
    prompt, first, added, second = told["prompt"], told["first"], told["added"], told["second"]
    assert told["problem"]["prompt"] == "How many cups?" and told["problem"]["prompt_ids"] == prompt
    assert "demo_env_lookup" in told["prompt_text"] and "How many cups?" in told["prompt_text"]
    assert "<tool_response>\n3\n</tool_response>" in told["added_text"]
    assert told["trace"]["token_ids"] == [*prompt, *first["ids"], *added, *second["ids"]]
    mask = [False] * len(prompt) + [True] * len(first["ids"]) + [False] * len(added) + [True] * len(second["ids"])
    assert told["trace"]["mask"] == mask
    assert told["trace"]["logprobs"] == [*first["logprobs"], *second["logprobs"]]
    components = {"reward": 1.0, "used_tool": 1.0, "tool_calls": 1.0}
    assert told["ending"]["ending"]["reward"] == 1.5
    assert components.items() <= told["ending"]["ending"]["components"].items()


def test_a_full_context_is_scored_as_it_stands(shown: dict[str, Any]) -> None:
    ending = shown["cut"]["scored"]["ending"]
    assert ending == {"reward": 0.0, "components": {"reward": 0.0, "used_tool": 0.0, "tool_calls": 0.0}}


def test_a_closed_session_leaves_no_program_within_5_s(shown: dict[str, Any]) -> None:
    told = shown["closed"]
    assert told["during"] >= 2, "an agent and a tool server"
    assert told["left"] == 0 and told["took_s"] < 5.0
    assert shown["left"] == 0, "nor is any left at the end of all"


def test_a_branch_is_refused(shown: dict[str, Any]) -> None:
    told = shown["branch"]
    status, answer = told["told"]
    assert status == 400 and "Branches are not supported" in answer["error"]["message"]
    assert told["raised"].startswith("episode_refused: ") and "rewritten its history" in told["raised"]
    assert told["stranger"] == 403


def test_a_request_posted_twice_is_one_turn(shown: dict[str, Any]) -> None:
    told = shown["posted_twice"]
    once, again = told["answers"]
    assert once == again and once["choices"][0]["token_ids"] == told["sent"]
    assert told["ending"]["ending"]["reward"] == 1.0
    assert told["ending"]["ending"]["components"]["tool_calls"] == 0.0


def test_a_killed_worker_loses_its_episodes_only(shown: dict[str, Any]) -> None:
    told = shown["killed"]
    assert told["raised"].startswith("session_gone: ") and "-9" in told["raised"]
    assert told["same"] and told["ending"]["ending"]["reward"] == 1.0
    assert told["left"] == 0


def test_an_agent_waits_for_a_slow_node(shown: dict[str, Any]) -> None:
    assert shown["late"]["ending"]["ending"]["reward"] == 1.0
