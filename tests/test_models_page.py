"""The table of docs/models.md agrees with `tests.families`, which the tests of the engines check."""

from __future__ import annotations

from pathlib import Path

from tests.families import FAILS, FAMILIES, NAMES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"


def expected_row(family: str) -> str:
    cells = ["no" if family in failing else "yes" for failing in FAILS.values()]
    return f"| {NAMES[family]} | `{FAMILIES[family]().model_type}` | {' | '.join(cells)} |"


def test_the_table_has_a_row_for_each_family_and_no_other() -> None:
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    begin = lines.index(f"| models | `model_type` | {' | '.join(FAILS)} |")
    end = lines.index("", begin)
    assert lines[begin + 2 : end] == [expected_row(family) for family in FAMILIES]


def test_every_failure_is_explained() -> None:
    text = " ".join(PAGE.read_text(encoding="utf-8").split())
    missing = {why for failing in FAILS.values() for why in failing.values() if why not in text}
    assert missing == set()


def test_failures_are_of_families_in_the_table() -> None:
    assert NAMES.keys() == FAMILIES.keys()
    assert {family for failing in FAILS.values() for family in failing} <= FAMILIES.keys()
