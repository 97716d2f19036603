from __future__ import annotations

from benchmarks.pages import Loaded, found_on, said_of, shape

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


def test_requests_to_other_hosts_are_reported() -> None:
    loaded = Loaded(
        "http://127.0.0.1:8710", urls=["http://127.0.0.1:8710/x", "data:image/png;base64,", "https://cdn.org/x"]
    )
    assert loaded.external == ["https://cdn.org/x"]
