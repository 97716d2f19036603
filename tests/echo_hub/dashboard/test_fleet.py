from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echo_hub.dashboard.fleet import (
    CHOICES_SHOWN,
    COLUMNS,
    FASTEST,
    FOREMOST_SHOWN,
    KINDS_SHOWN,
    STANDINGS,
    STATES,
    FleetQuery,
    WrongFleetQueryError,
    columns,
    find_nodes,
    fleet_query,
    foremost,
    kinds,
    page_links,
    standing_of,
    state_of,
    why_idle,
)
from echo_hub.dashboard.model import NodeView, RunState
from echo_shared.records.run import NodeTotals
from tests.echo_hub.dashboard.scripted_views import fleet_of


def node(name: str, *, totals: dict[str, Any] | None = None, **said: Any) -> NodeView:
    known = {"backend": "torch", "device": "NVIDIA L4", "first_seen": 1.0, "last_seen": 2.0, **(totals or {})}
    shown = {"connected": True, "activity": "sampling", "policy_version": 3, "capacity": 8, "in_flight": 0}
    given = {**shown, "tokens_per_s": 0.0, **said}
    return NodeView(totals=NodeTotals(node_id=f"id-{name}", name=name, **known), **given)


AWAY = {"connected": False, "activity": ""}
FLEET = (
    node("Bob", tokens_per_s=5.0, precision="bf16", totals={"standing": "proven", "checks": 9, "trained_rollouts": 4}),
    node("ada", tokens_per_s=9.0, precision="bf16", totals={"backend": "llama_cpp", "invite": "Ädä Lovelace"}),
    node("eve", tokens_per_s=7.0, totals={"standing": "quarantined", "failed_checks": 2, "cost": 0.5}),
    node("idle", activity="waiting", standby="too slow. It would be too old.", totals={"standing": "suspect"}),
    node("gone", **AWAY, totals={"device": "Apple M3", "last_seen": 9.0}),
    node("bad", **AWAY, totals={"banned_at": 5.0, "standing": "new"}),
)


def names(wanted: FleetQuery) -> list[str]:
    return [found.totals.name for found in find_nodes(FLEET, wanted).nodes]


def test_every_node_is_in_one_state_and_has_one_standing() -> None:
    assert [state_of(one) for one in FLEET] == ["sampling", "sampling", "sampling", "standing_by", "away", "banned"]
    assert {state_of(one) for one in FLEET} <= set(STATES)
    assert [standing_of(one) for one in FLEET[:2]] == ["proven", "unchecked"]
    assert {standing_of(one) for one in FLEET} <= set(STANDINGS)


async def test_why_a_node_is_idle(source: Any) -> None:
    run = await source.run_view()
    waiting = node("x", activity="waiting")
    assert why_idle(FLEET[0], run) == ""
    assert why_idle(FLEET[3], run) == "too slow. It would be too old."
    assert why_idle(waiting, run) == "it has no lease now"
    assert why_idle(replace(waiting, capacity=0), run) == "it accepts no work now"
    assert why_idle(waiting, replace(run, leasing="paused")) == "leasing is paused"
    assert why_idle(waiting, replace(run, state=RunState.FINISHED)) == "the run is finished"
    for activity in ("preparing", "fetching", "paused", "draining"):
        assert why_idle(node("x", activity=activity), run)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, ["Bob", "ada", "bad", "eve", "gone", "idle"]),
        ({"state": "away"}, ["gone"]),
        ({"state": "banned"}, ["bad"]),
        ({"state": "sampling", "standing": "proven"}, ["Bob"]),
        ({"standing": "unchecked"}, ["ada", "gone"]),
        ({"engine": "llama_cpp"}, ["ada"]),
        ({"precision": "bf16", "sort": "name"}, ["ada", "Bob"]),
        ({"precision": "-", "engine": "torch", "sort": "-name"}, ["idle", "gone", "eve", "bad"]),
        ({"search": "B"}, ["Bob", "bad"]),
        ({"search": "äDÄ"}, ["ada"]),
        ({"search": "apple"}, ["gone"]),
        ({"search": "LLAMA"}, ["ada"]),
        ({"search": "ID-E"}, ["eve"]),
        ({"search": "d-e"}, []),
        ({"sort": FASTEST}, ["ada", "eve", "Bob", "idle", "gone", "bad"]),
        ({"sort": "standing", "limit": 2}, ["eve", "idle"]),
        ({"sort": "state"}, ["Bob", "ada", "eve", "idle", "gone", "bad"]),
        ({"sort": "-state", "limit": 1}, ["bad"]),
        ({"sort": "cost", "limit": 1}, ["eve"]),
        ({"sort": "seen", "after": 0, "limit": 1}, ["gone"]),
        ({"sort": "name", "after": 4, "limit": 4}, ["gone", "idle"]),
        ({"after": 6}, []),
    ],
)
def test_nodes_are_found_sorted_and_cut(asked: dict[str, Any], found: list[str]) -> None:
    assert names(FleetQuery(**asked)) == found


def test_all_matches_are_counted_even_if_not_shown() -> None:
    part = find_nodes(FLEET, FleetQuery(search="b", limit=1))
    assert (len(part.nodes), part.num_found) == (1, 2)


def test_every_column_sorts_both_ways() -> None:
    for column in COLUMNS:
        there, back = names(FleetQuery(sort=column.key)), names(FleetQuery(sort=f"-{column.key}"))
        assert sorted(there) == sorted(back) and len(there) == len(FLEET)
    assert "cost" not in [column.key for column in columns(has_costs=False)]


def test_an_address_asks_and_is_asked_with() -> None:
    given = {"q": "  a \x00 b\n", "state": "away", "standing": "", "engine": "x" * 300, "sort": "-name", "after": "200"}
    wanted = fleet_query(given, limit=7)
    assert (wanted.search, wanted.state, wanted.sort, wanted.after) == ("a \x00 b", "away", "-name", 200)
    assert (len(wanted.engine), wanted.limit) == (128, 7)
    assert wanted.is_narrow and not FleetQuery(sort="name").is_narrow
    again = fleet_query(wanted.asked)
    assert again.asked == wanted.asked and again.after == 0
    assert fleet_query({"sort": "nonsense"}).sort == ""


@pytest.mark.parametrize("wrong", [{"state": "<b>"}, {"standing": "good"}, {"after": "x"}, {"after": "-1"}])
def test_an_impossible_query_is_refused_with_the_reason(wrong: dict[str, str]) -> None:
    with pytest.raises(WrongFleetQueryError, match=next(iter(wrong))):
        fleet_query(wrong)


def test_pages_link_to_each_other_and_keep_the_query() -> None:
    wanted = FleetQuery(search="a&b", sort="name", limit=2)
    nodes = FLEET[:2]
    assert page_links(wanted, find_nodes(nodes, replace(wanted, search=""))) == ("", "")
    before, behind = page_links(replace(wanted, after=2), find_nodes(FLEET, FleetQuery(after=2, limit=2)))
    assert (before, behind) == ("?q=a%26b&sort=name#table", "?q=a%26b&sort=name&after=4#table")
    beyond = FleetQuery(after=40, limit=10)
    assert page_links(beyond, find_nodes(FLEET, beyond)) == ("?after=30#table", "")


def test_kinds_count_all_nodes_and_link_to_their_lists() -> None:
    found = kinds(fleet_of(FLEET))
    assert [(one.name, one.number) for one in found.states] == [
        *(("sampling", 3), ("standing_by", 1), ("away", 1), ("banned", 1)),
    ]
    assert [(one.name, one.number) for one in found.standings] == [
        *(("quarantined", 1), ("suspect", 1), ("new", 1), ("proven", 1), ("unchecked", 2)),
    ]
    assert [(one.name, one.number, one.href) for one in found.engines] == [
        ("torch", 4, "/fleet?engine=torch&precision=-"),
        ("llama_cpp bf16", 1, "/fleet?engine=llama_cpp&precision=bf16"),
        ("torch bf16", 1, "/fleet?engine=torch&precision=bf16"),
    ]
    assert (found.number, found.num_other_engines, found.has_costs) == (6, 0, True)
    assert (found.all_engines, found.all_precisions) == (("llama_cpp", "torch"), ("-", "bf16"))
    for one in (*found.states, *found.standings, *found.engines):
        query = dict(part.split("=") for part in one.href.partition("?")[2].split("&"))
        assert find_nodes(FLEET, fleet_query(query)).num_found == one.number


def test_as_many_kinds_as_nodes_make_no_page_long() -> None:
    many = tuple(node(str(i), totals={"backend": f"engine-{i}"}) for i in range(200))
    found = kinds(fleet_of(many))
    assert (len(found.engines), found.num_other_engines) == (KINDS_SHOWN, 200 - KINDS_SHOWN)
    assert len(found.all_engines) == CHOICES_SHOWN and not found.has_costs
    nothing = kinds(fleet_of(()))
    assert (nothing.states, nothing.engines, nothing.number) == ((), (), 0)


def test_mistrusted_nodes_come_first_then_the_fastest() -> None:
    assert [one.totals.name for one in foremost(fleet_of(FLEET))] == ["eve", "idle", "ada", "Bob", "gone", "bad"]
    many = [node(f"{number:02}", **(AWAY if number % 2 else {})) for number in range(4 * FOREMOST_SHOWN)]
    assert len(foremost(fleet_of(many))) == FOREMOST_SHOWN
    few = [*many[1::2], many[0], node("owes", **AWAY, in_flight=3, totals={"last_seen": 9.0})]
    assert [one.totals.name for one in foremost(fleet_of(few))][:4] == ["00", "owes", "01", "03"]


def test_a_fleet_is_all_nodes_each_once() -> None:
    nodes = fleet_of(FLEET)
    assert len(nodes) == len(FLEET) and set(nodes.here) == {f"id-{name}" for name in ("Bob", "ada", "eve", "idle")}
    assert {one.totals.name for one in nodes} == {one.totals.name for one in FLEET}
    assert [nodes.get(one.totals.node_id) for one in FLEET] == list(FLEET) and nodes.get("nobody") is None
