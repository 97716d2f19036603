from __future__ import annotations

import json
import time
from typing import Any

import pytest

from echo_shared.files.strict_json import MOST_NESTED, read_json


@pytest.mark.parametrize(
    "value",
    [
        {"prompt": "½ 😀", "answer": -0.5, "more": [None, True, {"a": [1, 1e300, 10**4_000]}]},
        {"a": {"b": 1}, "b": {"b": 1}},
        [[[[]]]],
        "\u0000\ufeff\uffff",
        {"many": [[] for _ in range(500)]},
    ],
)
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_valid_json_is_read_unchanged(value: Any, mark: bytes) -> None:
    for ascii_only in (True, False):
        assert read_json(mark + json.dumps(value, ensure_ascii=ascii_only).encode()) == value
    deepest = b"[" * MOST_NESTED + b"]" * MOST_NESTED
    assert read_json(mark + deepest) == json.loads(deepest)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"", "not JSON"),
        (b'{"a": 1', "not JSON"),
        (b"{'a': 1}", "not JSON"),
        (b'{"a": 01}', "not JSON"),
        (b"NaN", "NaN, which is not a JSON number"),
        (b'{"a": [NaN]}', "NaN, which is not a JSON number"),
        (b'{"a": Infinity}', "Infinity, which is not a JSON number"),
        (b'{"a": -Infinity}', "-Infinity, which is not a JSON number"),
        (b'{"a": nan}', "not JSON"),
        (b'{"a": 1e999}', "1e999, which is too large"),
        (b'{"a": [-1.5E+400]}', "too large"),
        (b"1" + b"0" * 400 + b".0", "too large"),
        (b"1" * 5_000, "5000 digits"),
        (b'{"a": 1, "a": 1}', "the key 'a' more than once"),
        (b'{"b": [{"a": 1, "c": 2, "\\u0061": 3}]}', "the key 'a' more than once"),
        (b'{"\\ud83d": 1, "\\ud83d": 2}', "more than once"),
        (b'"A cut emoji \\ud83d 1+1="', r"\ud83d, one half"),
        (b'{"a": ["\\udc00"]}', r"\udc00, one half"),
        (b'{"\\uD800": 1}', r"\ud800, one half"),
        (b'["\\ude00\\ud83d"]', r"one half"),
        (b'"\xed\xa0\xbd"', "not UTF-8, at byte 2"),
        (b'{"a": "\xff"}', "not UTF-8"),
        ('{"a": 1}'.encode("utf-16"), "not UTF-8"),
        (b"[" * 100_000 + b"]" * 100_000, "nests lists and maps"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nests lists and maps"),
        (b"[" * 100_000, "nests lists and maps"),
        (b"[" * 101 + b"]" * 101, "nests lists and maps"),
        (b'[{"a":' * 60 + b"1" + b"}]" * 60, "nests lists and maps"),
    ],
)
def test_unusable_json_is_refused_with_the_reason(content: bytes, what: str) -> None:
    with pytest.raises(ValueError) as caught:
        read_json(content)
    assert what in str(caught.value)
    assert str(caught.value).startswith("it ")
    assert len(str(caught.value)) < 200
    str(caught.value).encode()


def test_a_repetition_among_many_keys_is_found_at_once() -> None:
    keys = ", ".join(f'"{number}": 0' for number in range(100_000))
    began_at = time.perf_counter()
    with pytest.raises(ValueError, match="the key '99999' more than once"):
        read_json(f'{{{keys}, "99999": 1}}'.encode())
    assert time.perf_counter() - began_at < 2.0
