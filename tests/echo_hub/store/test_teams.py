from __future__ import annotations

from typing import Any

import pytest

from echo_hub.store import teams
from echo_hub.store.board import read_board
from echo_hub.store.store import Store
from echo_hub.store.teams import change_team, name_key, read_own_team, read_team, remove_team
from echo_shared.errors import RefusedError
from echo_shared.records.credit import BoardQuery
from echo_shared.wire.messages import Team, TeamWanted


@pytest.fixture
def books(store: Store, records: Any) -> Store:
    for node_id in ("a", "b", "idle"):
        store.node_seen(node_id=node_id, public_key=bytes(32), name=node_id, backend="torch", device="cpu", now=1.0)
    store.apply(records.one_step(1, lease_id=1, group_id=0, node_id="a"), now=1.0)
    return store


def want(books: Store, node_id: str, action: Any, name: str = "") -> Team:
    books.write(change_team, node_id, TeamWanted(action=action, name=name), 5.0)
    return books.read(read_own_team, node_id, 5.0)


def test_a_team_is_credited_with_its_members_work_while_they_are_in_it(
    store: Store, books: Store, records: Any
) -> None:
    made = want(books, "a", "create", "The  Herons ")
    assert made == Team(
        name="The Herons", is_founder=True, members=1, rank=None, num_ranked=1, page="/teams/The%20Herons"
    )
    assert not want(books, "b", "join", "the herons").is_founder
    store.apply(records.one_step(2, lease_id=2, group_id=1, node_id="b"), now=2.0)
    assert want(books, "b", "leave") == Team()
    store.apply(records.one_step(3, lease_id=3, group_id=2, node_id="b"), now=3.0)
    shown = want(books, "a", "show")
    assert (shown.rollouts, shown.tokens, shown.members, shown.rank) == (2, 5, 1, 1)
    (row,) = books.read(read_board, BoardQuery(kind="team"), 5.0).rows
    assert (row.name, row.members, row.rollouts, row.steps) == ("The Herons", 1, 2, 1)
    of_team = books.read(read_board, BoardQuery(team="The Herons"), 5.0)
    assert [row.node for row in of_team.rows] == ["a"] and of_team.rows[0].team == "The Herons"


def test_joining_another_team_leaves_the_first(books: Store) -> None:
    want(books, "a", "create", "One")
    want(books, "b", "join", "One")
    books.write(change_team, "a", TeamWanted(action="create", name="Two"), 5.0)
    assert want(books, "a", "show").name == "Two" and want(books, "b", "show").members == 1


@pytest.mark.parametrize(
    ("node_id", "action", "name", "said"),
    [
        ("idle", "create", "Mine", "Nothing of this node's work"),
        ("a", "create", "0ne", "looks like"),
        ("a", "create", "оnе", "looks like"),
        ("a", "create", "ＯＮＥ", "already"),
        ("idle", "join", "None such", "no team"),
        ("stranger", "join", "One", "never joined"),
    ],
)
def test_invalid_team_requests_are_refused(books: Store, node_id: str, action: Any, name: str, said: str) -> None:
    want(books, "a", "create", "one")
    with pytest.raises(RefusedError, match=said):
        want(books, node_id, action, name)


def test_there_are_no_more_teams_than_the_hub_keeps(books: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teams, "MOST_TEAMS", 1)
    want(books, "a", "create", "One")
    with pytest.raises(RefusedError, match="as many teams"):
        want(books, "a", "create", "Two")


def test_an_empty_team_stays_if_it_has_done_something(store: Store, books: Store, records: Any) -> None:
    want(books, "a", "create", "Idle")
    want(books, "a", "leave")
    assert books.read(read_team, "Idle", 5.0) is None
    want(books, "a", "create", "Busy")
    store.apply(records.one_step(2, lease_id=2, group_id=1, node_id="a"), now=2.0)
    want(books, "a", "leave")
    found = books.read(read_team, "busy", 5.0)
    assert found is not None and found[1].standing.members == 0 and found[1].standing.rollouts == 2
    assert books.write(remove_team, "BUSY") and not books.write(remove_team, "busy")
    assert books.read(read_board, BoardQuery(kind="team"), 5.0).rows == ()


def test_names_that_unicode_treats_alike_are_one() -> None:
    assert name_key("ＨＥＲＯＮＳ  united") == name_key("Herons United") == "herons united"


def test_a_name_has_no_direction_or_control_characters() -> None:
    assert TeamWanted(action="join", name="\u202eabc\u0007\n").name == "?abc??"


def test_a_refused_request_changes_nothing(store: Store) -> None:
    with pytest.raises(RefusedError):
        store.write(change_team, "a", TeamWanted(action="create", name="x"), 1.0)
    assert store.read(read_own_team, "a", 1.0) == Team()
