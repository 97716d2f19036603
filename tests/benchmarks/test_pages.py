from __future__ import annotations

from benchmarks.pages import found_on, headline, said_of, shape, to_other_hosts

VIOLATIONS = [
    {"id": "color-contrast", "impact": "serious", "nodes": [{"target": ["#a"]}, {"target": ["#b"]}]},
    {"id": "button-name", "impact": "critical", "nodes": [{"target": ["#c"]}]},
    {"id": "region", "impact": "moderate", "nodes": [{"target": ["#d"]}]},
]


def test_faults_are_counted_by_element_and_said_by_rule() -> None:
    assert found_on(VIOLATIONS) == {"serious": 3, "moderate": 1, "minor": 0}
    assert said_of(VIOLATIONS)[0] == "serious: color-contrast: ['#a'] (2)"


def test_pages_that_differ_only_in_ids_count_as_one() -> None:
    assert shape("/rollouts/17?colour=version") == shape("/rollouts/18") == "/rollouts/*"
    assert shape("/nodes/0a1b2c3d4e") == "/nodes/*"
    assert shape("/fleet/009e3779b10000000000") == "/fleet/*" != shape("/fleet?state=away")
    assert shape("/leaderboard?node=1") == "/leaderboard" != shape("/")


def test_the_headline_sums_faults_and_takes_the_worst_figure() -> None:
    rows = [{"axe_serious": 1, "transfer_kb": 5.0}, {"axe_serious": 2, "transfer_kb": 9.0}, {"snapshot_ms": 3.0}]
    found = headline(rows)
    assert (found["axe_serious"], found["transfer_kb"], found["snapshot_ms"], found["live_delay_s"]) == (3, 9, 3, None)


def test_requests_to_other_hosts_are_reported() -> None:
    urls = ["http://127.0.0.1:8710/x", "data:image/png;base64,", "https://cdn.org/x"]
    assert to_other_hosts(urls, "http://127.0.0.1:8710") == ["https://cdn.org/x"]
