import json
import os
from pathlib import Path
from typing import Any

import pytest

from echo_hub.tasks.jsonl import make_jsonl
from echo_hub.tasks.stream import ProblemStream
from echo_shared.errors import ConfigError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "data.jsonl", *({"prompt": f"{n}+1=", "answer": n + 1, "level": n % 3} for n in range(100)))


def write(path: Path, *lines: object) -> Path:
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return path


def stream(path: Path, *, heldout: int = 20, **options: Any) -> ProblemStream:
    return ProblemStream(make_jsonl({"path": str(path), **options}), run_seed=0, heldout_problems=heldout)


def test_a_line_is_a_problem_and_its_further_keys_are_metadata(tmp_path: Path) -> None:
    path = write(tmp_path / "one.jsonl", {"prompt": "Wie groß ist ½+½?", "answer": 1, "source": {"page": 3}})
    problem = make_jsonl({"path": str(path)}).sample(2**64 - 1)
    assert problem.prompt == "Wie groß ist ½+½?"
    assert problem.metadata == {"answer": "1", "source": {"page": 3}}


def test_every_line_but_blank_ones_is_sampled(data: Path) -> None:
    data.write_bytes(b"\n" + data.read_bytes().replace(b"\n", b"\r\n\r\n").removesuffix(b"\r\n\r\n"))
    task = make_jsonl({"path": str(data)})
    assert task.num_problems == 100
    assert {task.sample(seed).prompt for seed in range(1_000)} == {f"{n}+1=" for n in range(100)}


@pytest.mark.parametrize(
    ("grader", "completion", "reward"),
    [
        ("math", "I think it is \\boxed{0.5}", 1.0),
        ("math", "\\boxed{0.6}", 0.0),
        ("exact", " 1/2\n", 1.0),
        ("exact", "Hm. <answer>1/2</answer>", 1.0),
        ("exact", "0.5", 0.0),
        ("exact", "I think it is 1/2", 0.0),
    ],
)
def test_graders(tmp_path: Path, grader: str, completion: str, reward: float) -> None:
    path = write(tmp_path / "one.jsonl", {"prompt": "1 over 2?", "answer": "1/2"})
    task = make_jsonl({"path": str(path), "answer": grader})
    assert task.score(task.sample(0), completion) == reward


def test_a_line_may_require_a_form_of_its_answer(tmp_path: Path) -> None:
    line = {"prompt": "Expand (x-1)(x+1).", "answer": "x^2-1", "answer_form": "expanded"}
    task = make_jsonl({"path": str(write(tmp_path / "one.jsonl", line))})
    problem = task.sample(0)
    answers = ("x^2-1", "<answer>-1+x^2</answer>", "<answer>(x+1)(x-1)</answer>", "<answer>(x-1)(x+1)</answer>")
    assert [task.score(problem, answer) for answer in answers] == [1.0, 1.0, 0.0, 0.0]


def test_repeating_the_question_earns_nothing(tmp_path: Path) -> None:
    task = make_jsonl({"path": str(write(tmp_path / "one.jsonl", {"prompt": "Simplify 6/8.", "answer": "3/4"}))})
    assert [task.score(task.sample(0), answer) for answer in ("6/8", "3/4", "0.75")] == [0.0, 1.0, 1.0]


@pytest.mark.parametrize(("number", "text"), [(0.00001, "0.00001"), (1e20, "1" + 20 * "0"), (2.5, "2.5"), (3.0, "3.0")])
def test_numbers_of_the_file_are_written_as_people_write_them(tmp_path: Path, number: float, text: str) -> None:
    task = make_jsonl(
        {"path": str(write(tmp_path / "one.jsonl", {"prompt": "?", "answer": number})), "answer": "exact"}
    )
    assert task.sample(0).metadata["answer"] == text
    assert task.score(task.sample(0), f"<answer>{text}</answer>") == 1.0


def test_held_out_problems_are_never_trained_on(data: Path) -> None:
    problems = stream(data, heldout=95)
    problems.prepare()
    heldout = {problems.heldout(number).prompt for number in range(95)}
    assert len(heldout) == 95
    assert {problems.train(number).prompt for number in range(500)} == {f"{n}+1=" for n in range(100)} - heldout


def test_a_file_of_held_out_problems_is_used_in_its_order_and_never_trained_on(data: Path, tmp_path: Path) -> None:
    sums = [{"prompt": f"{n}+1=", "answer": n + 1} for n in (7, 3, 500)]
    problems = stream(data, heldout=3, heldout_path=str(write(tmp_path / "heldout.jsonl", *sums)))
    assert [problems.heldout(number).prompt for number in range(3)] == ["7+1=", "3+1=", "500+1="]
    assert not {problems.train(number).prompt for number in range(1_000)} & {"7+1=", "3+1="}


def test_a_set_that_is_too_small_is_refused_at_once(data: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too few problems") as caught:
        stream(data, heldout=96).prepare()
    assert "100 problems, evaluation.problems = 96" in str(caught.value)
    assert "at most 95" in str(caught.value)
    heldout = write(tmp_path / "heldout.jsonl", {"prompt": "?", "answer": "!"})
    with pytest.raises(ConfigError, match="too few problems") as caught:
        stream(data, heldout=2, heldout_path=str(heldout)).prepare()
    assert "1 held-out problems" in str(caught.value)


def test_the_same_prompt_again_and_again_is_too_small_a_set(tmp_path: Path) -> None:
    path = write(tmp_path / "same.jsonl", *[{"prompt": "1+1=", "answer": 2}] * 50)
    with pytest.raises(ConfigError, match="too few different problems"):
        stream(path, heldout=2).prepare()


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('{"prompt": "1+1="', "is not JSON"),
        ("[1, 2]", "is not a map"),
        ('"text"', "is not a map"),
        ('{"answer": "2"}', "has no text as prompt"),
        ('{"prompt": "  ", "answer": "2"}', "has no text as prompt"),
        ('{"prompt": 5, "answer": "2"}', "has no text as prompt"),
        ('{"prompt": "1+1="}', "has neither text nor a number as answer"),
        ('{"prompt": "1+1=", "answer": ""}', "has neither text nor a number as answer"),
        ('{"prompt": "1+1=", "answer": true}', "has neither text nor a number as answer"),
        ('{"prompt": "1+1=", "answer": ["2"]}', "has neither text nor a number as answer"),
        (
            '{"prompt": "1+1=", "answer": 2, "answer_form": "pretty"}',
            "has an answer_form that is none of number, simpli",
        ),
        (
            '{"prompt": "1+1=", "answer": 2, "answer_form": ["unit"]}',
            "has an answer_form that is none of number, simpli",
        ),
    ],
)
def test_a_bad_line_is_named_with_its_file_number_and_what_it_should_be(data: Path, line: str, what: str) -> None:
    data.write_text(data.read_text() + line + "\n" + '{"prompt": "5", "answer": "5"}\n')
    with pytest.raises(ConfigError) as caught:
        make_jsonl({"path": str(data)})
    assert what in caught.value.what
    assert caught.value.got == f"{data}, line 101: {line}"
    assert '{"prompt": ' in str(caught.value.do)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        (b'{"prompt": "A cut emoji \\ud83d 1+1=", "answer": "2"}', r"\ud83d, one half of a character"),
        (b'{"prompt": "1+1=", "answer": "\\udc00"}', "one half of a character"),
        (b'{"prompt": "1+1=", "answer": "2", "note": ["\\ude00\\ud83d"]}', "one half of a character"),
        (b'{"prompt": "1+1=", "answer": "2", "\\ud83d": 1}', "one half of a character"),
        (b'{"prompt": "1\xed\xa0\xbd", "answer": "2"}', "not UTF-8"),
        (b'{"prompt": "1+1=", "answer": NaN}', "NaN, which is not a JSON number"),
        (b'{"prompt": "1+1=", "answer": Infinity}', "Infinity, which is not a JSON number"),
        (b'{"prompt": "1+1=", "answer": -Infinity}', "-Infinity, which is not a JSON number"),
        (b'{"prompt": "1+1=", "answer": 1e999}', "1e999, which is too large"),
        (b'{"prompt": "1+1=", "answer": "2", "weight": -1E400}', "-1E400, which is too large"),
        (b'{"prompt": "1+1=", "answer": "2", "weight": NaN}', "NaN, which is not a JSON number"),
        (b'{"prompt": "1+1=", "answer": "2", "answer": "3"}', "the key 'answer' more than once"),
        (b'{"prompt": "1+1=", "prompt": "1+1=", "answer": "2"}', "the key 'prompt' more than once"),
        (b'{"prompt": "1+1=", "answer": "2", "more": {"a": 1, "a": 1}}', "the key 'a' more than once"),
        (
            b'{"prompt": "1+1=", "answer": "2", "more": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
            "nests lists and maps",
        ),
        (b'{"prompt": "1+1=", "answer": "2", "more": ' + b"[" * 500 + b"]" * 500 + b"}", "nests lists and maps"),
        (b'{"prompt": "1+1=", "answer": "2", "more": ' + b'{"a": ' * 100_000, "nests lists and maps"),
        (b'{"prompt": "1+1=", "answer": ' + b"9" * 5_000 + b"}", "a number of 5000 digits"),
        (b"[" * 100_000, "nests lists and maps"),
        (b'{"prompt": "' + b"1" * 10_000_000, "is not JSON"),
    ],
    ids=range(20),
)
def test_an_ambiguous_line_is_refused_with_its_number(data: Path, line: bytes, what: str) -> None:
    data.write_bytes(data.read_bytes() + line + b"\n" + b'{"prompt": "5", "answer": "5"}\n')
    with pytest.raises(ConfigError) as caught:
        make_jsonl({"path": str(data)})
    assert what in caught.value.what
    assert f"{data}, line 101: " in str(caught.value)
    assert len(str(caught.value)) < 1_000
    str(caught.value).encode()


@pytest.mark.parametrize("answer", ["0", "-0.0", "1e308", "5e-324", "123456789012345678901234567890", '"NaN"'])
def test_numbers_that_are_some_are_taken(tmp_path: Path, answer: str) -> None:
    (tmp_path / "one.jsonl").write_text(f'{{"prompt": "?", "answer": {answer}}}')
    assert make_jsonl({"path": str(tmp_path / "one.jsonl")}).sample(0).metadata["answer"]


@pytest.mark.parametrize("before", [b"", b"\n", b"\r\n \n"])
def test_a_byte_order_mark_is_no_part_of_a_line(tmp_path: Path, before: bytes) -> None:
    path = tmp_path / "marked.jsonl"
    lines = b'{"prompt": "1+1=", "answer": 2}\n{"prompt": "\xef\xbb\xbf2", "answer": 3}\n'
    path.write_bytes(b"\xef\xbb\xbf" + before + lines)
    task = make_jsonl({"path": str(path)})
    assert [task.problem(number).prompt for number in range(2)] == ["1+1=", "\ufeff2"]


def test_bytes_that_are_no_text_and_long_lines_are_shown_all_the_same(data: Path) -> None:
    data.write_bytes(data.read_bytes() + b"\xff\xfe" + b"x" * 100_000)
    with pytest.raises(ConfigError, match="is not UTF-8") as caught:
        make_jsonl({"path": str(data)})
    assert len(str(caught.value)) < 1_000


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "empty.jsonl").write_text(content)
    with pytest.raises(ConfigError, match="is empty"):
        make_jsonl({"path": str(tmp_path / "empty.jsonl")})


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        make_jsonl({"path": str(tmp_path / "none.jsonl")})
    assert "none.jsonl" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({}, "task.options.path"),
        ({"path": "x", "file": "y"}, "task.options.file"),
        ({"path": "x", "answer": "fuzzy"}, "answer"),
    ],
)
def test_a_wrong_option_is_named_with_the_valid_ones(options: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError) as caught:
        make_jsonl(options)
    assert named in str(caught.value)
    assert "path, heldout_path, answer" in str(caught.value)


def test_another_content_has_another_hash(data: Path, tmp_path: Path) -> None:
    task = make_jsonl({"path": str(data)})
    copy = tmp_path / "copy.jsonl"
    copy.write_bytes(data.read_bytes())
    assert make_jsonl({"path": str(copy)}).content_hash == task.content_hash
    with_heldout = make_jsonl({"path": str(data), "heldout_path": str(copy)})
    copy.write_bytes(data.read_bytes().replace(b"99+1", b"98+1"))
    assert make_jsonl({"path": str(copy)}).content_hash != task.content_hash
    assert make_jsonl({"path": str(data), "heldout_path": str(copy)}).content_hash != with_heldout.content_hash


def test_a_file_that_changes_while_it_is_used_is_noticed(data: Path) -> None:
    task = make_jsonl({"path": str(data)})
    with data.open("a") as file:
        file.write('{"prompt": "new", "answer": "new"}\n')
    with pytest.raises(ConfigError, match="has changed"):
        task.sample(0)
    data.unlink()
    with pytest.raises(ConfigError, match="cannot be read any more"):
        task.sample(0)


def test_a_rewritten_file_of_the_same_size_is_noticed_too(data: Path) -> None:
    task = make_jsonl({"path": str(data)})
    data.write_bytes(data.read_bytes())
    os.utime(data, ns=(0, 0))
    with pytest.raises(ConfigError, match="has changed"):
        task.sample(0)


def test_reference_answers_that_are_not_understood_are_named_by_line(tmp_path: Path) -> None:
    answers = ["1", r"1, 2, \ldots, n", "x+1", r"\int_0^1 x dx", "Yes"]
    path = write(tmp_path / "some.jsonl", *({"prompt": "?", "answer": answer} for answer in answers))
    path.write_text("\n" + path.read_text())
    task = make_jsonl({"path": str(path)})
    (note,) = task.notes()
    assert note.startswith("2 of the first 1,000 lines of") and note.endswith("line 3, 5.")
    assert [task.reading(task.problem(number)) for number in range(5)] == [
        "a number",
        "not understood",
        "a formula",
        "not understood",
        "words",
    ]
    exact = make_jsonl({"path": str(path), "answer": "exact"})
    assert exact.notes() == () and exact.reading(exact.problem(1)) == "text"


@pytest.mark.parametrize(
    ("completion", "verdict"),
    [("<answer>1</answer>", "right"), ("<answer>2</answer>", "wrong"), ("<answer>1 apple?</answer>", "not understood")],
)
def test_an_answer_has_a_verdict_in_words(tmp_path: Path, completion: str, verdict: str) -> None:
    task = make_jsonl({"path": str(write(tmp_path / "one.jsonl", {"prompt": "?", "answer": "1"}))})
    assert task.verdict(task.sample(0), completion) == verdict
    assert task.score(task.sample(0), completion) == (verdict == "right")
