from __future__ import annotations

import pytest

from echo_shared.errors import CodecError
from echo_shared.wire.codec import decode_from_hub, decode_from_node, encode
from echo_shared.wire.messages import MAX_TEAM_NAME, Team, TeamWanted
from tests.echo_shared.wire.messages.examples import TEAM, changed


@pytest.mark.parametrize(
    ("field", "value"), [("action", "destroy"), ("name", "x" * (MAX_TEAM_NAME + 1)), ("name", 7), ("name", None)]
)
def test_a_nodes_team_request_is_bounded(field: str, value: object) -> None:
    with pytest.raises(CodecError):
        decode_from_node(changed(TeamWanted(action="create", name="Herons"), **{field: value}))


@pytest.mark.parametrize(("field", "value"), [("page", "javascript:alert(1)"), ("page", "/\n"), ("rank", 0)])
def test_a_hubs_team_answer_is_bounded(field: str, value: object) -> None:
    with pytest.raises(CodecError):
        decode_from_hub(changed(TEAM, **{field: value}))


@pytest.mark.parametrize("name", ["a\u202eb", "a\u200b", "\u3164", "x\x1b[2J", "The Hub", "аdmin"])
def test_no_team_is_made_that_hides_or_imitates_something(name: str) -> None:
    with pytest.raises(CodecError, match="a name may"):
        decode_from_node(changed(TeamWanted(action="create", name="Herons"), name=name))


def test_names_of_existing_teams_are_cleaned() -> None:
    said = decode_from_node(encode(TeamWanted(action="join", name="a\u202eb\u200bc\x1b[2J\n")))
    assert isinstance(said, TeamWanted) and said.name == "a?b?c?[2J?"
    assert Team(name="\u2066x").name == "?x"
