from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from echo_node.host.hubs import HubRecord, Hubs
from echo_node.host.paths import NodePaths
from echo_node.main import app
from echo_shared.errors import ConfigError, RefusedError
from echo_shared.wire.messages import Team


@pytest.fixture
async def joined(bare_hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("ECHO_NODE_HOME", str(tmp_path / "home"))
    key = bare_hub.me.public_key.hex()
    Hubs(NodePaths.find(None)).save(
        HubRecord(url=bare_hub.url, hub_key_hex=key, joined_at=1.0, run_id="run-1", run_name="a run")
    )
    return bare_hub


async def said(*arguments: str) -> str:
    """Run `echo-node team` on a thread: the hub in this process must answer it."""
    result = await asyncio.to_thread(
        lambda: CliRunner().invoke(app, ["team", *arguments], catch_exceptions=False),
    )
    assert result.exit_code == 0, result.output
    return result.output


async def test_how_the_team_stands_is_printed(joined: Any) -> None:
    joined.books_answer = Team(
        name="[b]Herons",
        is_founder=True,
        members=3,
        rollouts=12,
        tokens=340,
        tokens_per_day=56.4,
        rank=2,
        num_ranked=5,
        page="/teams/Herons",
    )
    text = await said("create", "[b]Herons")
    for word in ("[b]Herons, made by this node", "12 rollouts, 340 tokens: #2 of 5", "56 tokens a day"):
        assert word in text
    assert f"{joined.url}/teams/Herons" in text
    told = json.loads(await said("show", "--json"))
    assert (told["team"], told["members"], told["page"]) == ("[b]Herons", 3, f"{joined.url}/teams/Herons")


async def test_without_a_team_the_command_says_how_to_join_one(joined: Any) -> None:
    assert "echo-node team join NAME" in await said("leave")
    assert json.loads(await said("show", "--json"))["team"] is None


@pytest.mark.parametrize("name", ["", "x" * 41, "a\nb", "\u202eabc"])
async def test_an_invalid_name_is_not_sent(joined: Any, name: str) -> None:
    with pytest.raises(ConfigError, match="not a valid team name"):
        await said("join", name)
    assert joined.handshakes == 0


async def test_a_refusal_is_the_hub_s_word(joined: Any) -> None:
    joined.refusal = RefusedError("There is no team of this name.", do="See /teams.")
    with pytest.raises(RefusedError, match="The hub says: There is no team"):
        await said("join", "None")
