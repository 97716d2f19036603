from __future__ import annotations

from scripts.docs.markdown import code, paragraphs, table, text


def test_a_table_has_a_line_a_row_and_none_is_nothing() -> None:
    assert table(("a", "b"), [("1", "2")]) == "| a | b |\n| --- | --- |\n| 1 | 2 |\n\n"
    assert table(("a", "b"), []) == ""


def test_prose_steers_no_markdown_and_code_stays_code() -> None:
    assert text("a | b\n <tag> of `x|<y>` is *not* _it_") == r"a \| b \<tag> of `x\|<y>` is \*not\* \_it\_"
    assert text(None) == ""
    assert code("a|b") == r"`a\|b`" and code("a `b`") == "``a `b```"


def test_drawings_in_docstrings_stay_unchanged() -> None:
    assert paragraphs("One.\n\n        a ─► b\n    Two.") == "One.\n\n    a ─► b\nTwo.\n\n"
