from __future__ import annotations

import pytest

from benchmarks.papers.cases import Case
from benchmarks.papers.table import Entry, Table, accuracy, finite
from tests.benchmarks.papers.toy import ran

ONE = Case(name="one")


def test_a_row_has_ours_theirs_and_where_theirs_is_from() -> None:
    table = Table(
        name="T",
        source="arXiv 1, table 2",
        scale="7B",
        entries=(Entry(case=ONE, reports="42.0"),),
        headline=lambda found: {"mean": accuracy(found[ONE])},
        columns=lambda case, of_case: {"more": len(of_case)},
    )
    found = {ONE: [ran(0.1, 0.4), ran(0.3, 0.8)]}
    (row,) = table.rows(found)
    assert row["accuracy"] == pytest.approx(0.6) and row["before"] == pytest.approx(0.2)
    assert (row["lowest"], row["highest"], row["seeds"], row["more"]) == (0.4, 0.8, 2, 2)
    assert (row["paper"], row["paper_scale"], row["source"]) == ("42.0", "7B", "arXiv 1, table 2")
    assert table.headline(found)["mean"] == pytest.approx(0.6)


def test_what_is_never_reached_is_none_in_json() -> None:
    assert finite(float("inf")) is None and finite(2.0) == 2.0
