"""The list of cases includes every case from which the headline is computed."""

from benchmarks.dissemination import cases
from benchmarks.dissemination.cases import HEADLINE_NODES, LARGE, LINK_SETS, LOSSES, MIDDLE, NUM_NODES, SMALL


def measured() -> set[tuple[float | str, ...]]:
    return {
        (side, case.size_bytes, fleet.num_nodes, *fleet.links.columns.values())
        for fleet in cases.over_links()
        for case in fleet.cases
        for side in case.sides
    }


def test_every_case_has_a_name_of_its_own() -> None:
    fleets = [*cases.over_links(), *cases.over_wan()]
    planned = cases.plan(fleets)
    assert len({case.name for case in planned}) == len(planned) == sum(len(fleet.cases) for fleet in fleets)


def test_echo_is_measured_on_all_links_with_all_fleets() -> None:
    for links in LINK_SETS:
        for num_nodes in NUM_NODES:
            sizes = (SMALL, MIDDLE, LARGE) if num_nodes == HEADLINE_NODES else (SMALL, MIDDLE)
            for size in sizes:
                assert ("echo", size, num_nodes, links.hub_up, links.node_up) in measured()


def test_unicast_is_measured_once_a_hub_uplink() -> None:
    for hub_up in (20, 100):
        for size in (MIDDLE, LARGE):
            assert ("http", size, HEADLINE_NODES, hub_up, 20) in measured()
            assert ("http", size, HEADLINE_NODES, hub_up, 40) not in measured()


def test_echo_is_measured_on_unequal_homes_at_every_loss() -> None:
    measured_there = {
        (case.size_bytes, fleet.links.columns["loss"], fleet.num_nodes)
        for fleet in cases.over_wan()
        for case in fleet.cases
        if "echo" in case.sides
    }
    assert measured_there == {(size, loss, HEADLINE_NODES) for size in (SMALL, MIDDLE) for loss in LOSSES}
