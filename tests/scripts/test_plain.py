"""The check of plain language accepts sentences just within each rule or limit, and refuses sentences just beyond
it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.plain import Count, function_share, main, measure, passages, sentences

HOLLOW = "It is not what it was before, and so nobody has any of it again."
PLAIN = "The hub sends each node one signed delta, and nodes pass deltas to other nodes."
WORN = "The hub opens the database anew, and nodes wait until the hub answers leases."


def counts(file: Path, text: str) -> tuple[Count, Count, Count]:
    file.write_text(text, encoding="utf-8")
    return measure([file])


def documented(*texts: str) -> str:
    return "\n".join(f'def function{number}():\n    """{text}"""\n' for number, text in enumerate(texts))


@pytest.mark.parametrize(
    ("words", "share"),
    [
        ("the of and to in it by hub node lease", 0.7),
        ("the of and to in it node lease hub disk", 0.6),
        ("The of And to in node lease hub disk base", 0.5),
    ],
)
def test_the_share_of_function_words(words: str, share: float) -> None:
    assert function_share(words) == share


@pytest.mark.parametrize(("function_words", "hollow"), [(11, 0), (12, 1), (13, 1)])
def test_a_sentence_is_hollow_from_three_fifths(tmp_path: Path, function_words: int, hollow: int) -> None:
    words = ["the"] * function_words + ["node"] * (20 - function_words)
    assert len(counts(tmp_path / "page.md", " ".join(words))[0].findings) == hollow


@pytest.mark.parametrize(("length", "counted"), [(11, 0), (12, 1), (34, 1), (35, 0)])
def test_only_sentences_of_some_length_count(length: int, counted: int) -> None:
    assert len(list(sentences(" ".join(["node"] * length)))) == counted


def test_code_in_a_sentence_is_one_word() -> None:
    text = "Return `a + b + c + d` for the hub, node, lease, disk, base, run and group. Next."
    assert list(sentences(text)) == ["Return X for the hub, node, lease, disk, base, run and group."]


@pytest.mark.parametrize(
    ("docstring", "found"),
    [
        ("Return the lease.", 0),
        ("Number of leases.", 0),
        ("Of the leases, the newest.", 1),
        ("Whether the node is ready.", 1),
        ("The lease.", 1),
        ("...", 0),
    ],
)
def test_a_functions_docstring_begins_with_a_verb_or_the_thing(tmp_path: Path, docstring: str, found: int) -> None:
    assert len(counts(tmp_path / "module.py", documented(docstring))[1].findings) == found


def test_modules_classes_and_values_may_begin_with_an_article(tmp_path: Path) -> None:
    text = '"""The module."""\nclass Lease:\n    """A lease."""\n    value = 1\n    """The value."""\n'
    assert counts(tmp_path / "module.py", text)[1].texts == 0


@pytest.mark.parametrize(("sentence", "found"), [(PLAIN, 0), (WORN, 1), (WORN.replace("anew", "again"), 0)])
def test_worn_phrases(tmp_path: Path, sentence: str, found: int) -> None:
    count = counts(tmp_path / "page.md", sentence)[2]
    assert (count.texts, len(count.findings)) == (1, found)


def test_prose_of_a_python_file(tmp_path: Path) -> None:
    (tmp_path / "module.py").write_text(
        '"""Module."""\n'
        "import os  # noqa: F401\n"
        "# One\n"
        "# block.\n"
        "\n"
        "x = 1  # Another.\n"
        "def f():\n"
        '    """Function."""\n'
        '    return "text"\n',
        encoding="utf-8",
    )
    found = {(passage.line, passage.text, passage.documents_function) for passage in passages(tmp_path / "module.py")}
    assert found == {
        (1, "Module.", False),
        (3, "One block.", False),
        (6, "Another.", False),
        (8, "Function.", True),
    }


def test_prose_of_a_page_leaves_out_headings_tables_and_code(tmp_path: Path) -> None:
    page = "# Heading\n\nText with `code` and [a link](there.md).\n\n| a | b |\n\n```sh\nmake\n```\n\nEnd.\n"
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    found = [(passage.line, passage.text) for passage in passages(tmp_path / "page.md")]
    assert found == [(3, "Text with  and a link."), (11, "End.")]


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (" ".join([PLAIN] * 24 + [HOLLOW.replace("nobody", "none")]), 0),
        (" ".join([PLAIN] * 23 + [HOLLOW.replace("nobody", "none")]), 1),
        (" ".join([PLAIN] * 333 + [WORN]), 0),
        (" ".join([PLAIN] * 332 + [WORN]), 1),
    ],
    ids=["hollow, 4 %", "hollow, more", "worn, less", "worn, more"],
)
def test_the_limits_of_pages(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, status: int) -> None:
    (tmp_path / "page.md").write_text(text, encoding="utf-8")
    assert main([str(tmp_path)]) == status
    assert ("page.md:1: " in capsys.readouterr().out) == bool(status)


@pytest.mark.parametrize(("plain", "status"), [(9, 0), (8, 1)])
def test_the_limit_of_docstrings(tmp_path: Path, plain: int, status: int) -> None:
    text = documented("The lease.", *["Return the lease."] * plain)
    (tmp_path / "module.py").write_text(text, encoding="utf-8")
    assert main([str(tmp_path / "module.py")]) == status


def test_files_of_others_and_of_other_kinds_are_skipped(tmp_path: Path) -> None:
    for name in (".venv/page.md", "node_modules/page.md", "build/page.md", "notes.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(PLAIN, encoding="utf-8")
    assert [count.texts for count in measure([tmp_path])] == [0, 0, 0]
