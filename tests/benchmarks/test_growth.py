from __future__ import annotations

from benchmarks.growth import HEADLINE, headline


def test_the_headline_has_the_figures_of_each_size_and_database() -> None:
    found = headline([{"case": "10,000 nodes, PostgreSQL", "start_s": 2.0}, {"case": "1,000 nodes", "start_s": 1.0}])
    assert len(found) == 4 * len(HEADLINE)
    assert {name: value for name, value in found.items() if value is not None} == {
        "start_s_10000_postgresql": 2.0,
        "start_s_1000": 1.0,
    }
