from __future__ import annotations

import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.dashboard import formats
from echo_shared.records.step_figures import Unit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (formats.count(12480), "12,480"),
        (formats.count(None), "–"),
        (formats.fixed(0.7149), "0.71"),
        (formats.fixed(None), "–"),
        (formats.rate(0), "0"),
        (formats.rate(0.4213), "0.42"),
        (formats.rate(64.23), "64.2"),
        (formats.rate(99.96), "100"),
        (formats.rate(4820.4), "4,820"),
        (formats.dollars(0), "$0"),
        (formats.dollars(0.4), "$0.40"),
        (formats.dollars(0.01), "$0.01"),
        (formats.dollars(0.00012345), "$0.000123"),
        (formats.dollars(12.345), "$12.35"),
        (formats.dollars(4820.4), "$4,820"),
        (formats.dollars(None), "–"),
        (formats.scientific(0.0000213), "2.1e-05"),
        (formats.scientific(None), "–"),
        (formats.percent(0.8828), "88.3 %"),
        (formats.percent(0.8828, 0), "88 %"),
        (formats.percent(None), "–"),
        (formats.size(512), "512 B"),
        (formats.size(1_412_096), "1.41 MB"),
        (formats.size(999_960), "1.00 MB"),
        (formats.size(None), "–"),
        (formats.size(3 * 10**15), "3,000 TB"),
        (formats.duration(None), "–"),
        (formats.duration(-3), "0.0 s"),
        (formats.duration(0.94), "0.9 s"),
        (formats.duration(42), "42 s"),
        (formats.duration(200), "3 min 20 s"),
        (formats.duration(3600), "1 h"),
        (formats.duration(2 * 86_400 + 4 * 3_600 + 59), "2 d 4 h"),
        (formats.ago(100, 102), "now"),
        (formats.ago(100, 90), "now"),
        (formats.ago(100, 142), "42 s ago"),
        (formats.ago(0, 7_300), "2 h ago"),
        (formats.iso(0), "1970-01-01T00:00:00Z"),
        (formats.clock(3_661), "01:01:01"),
    ],
)
def test_numbers_and_times(text: str, expected: str) -> None:
    assert text.replace("\u202f", " ") == expected


def test_a_name_of_nothing_visible_becomes_the_nodes_id() -> None:
    assert formats.display_name("\u200b\u202e", "0123456789abcdef") == "01234567"
    assert formats.display_name("\u202egnp.exe", "0123456789abcdef") == "gnp.exe"
    assert formats.display_name("日本語 🌊") == "日本語 🌊"


@given(st.text(), st.just("0123456789abcdef"))
def test_a_shown_name_is_never_empty_and_never_invisible(name: str, node_id: Any) -> None:
    shown = formats.display_name(name, node_id)
    assert shown.strip()
    assert not any(unicodedata.category(c) in {"Cc", "Cf", "Zl", "Zp"} for c in shown)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (42.0, "s", "42\u202fs"),
        (0.5, "share", "50.0\u202f%"),
        (4_820.4, "tokens/s", "4,820"),
        (0.00312, "nats/token", "0.0031"),
        (1.25, "", "1.2"),
        (None, "s", formats.UNKNOWN),
        (None, "", formats.UNKNOWN),
    ],
)
def test_a_figure_is_shown_in_its_unit(value: float | None, unit: Unit, text: str) -> None:
    assert formats.in_unit(value, unit) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain <b> text", "plain <b> text"),
        ("two\n\tlines", "two\n\tlines"),
        ("\x1b[2J\x00\x7f\r", "␛[2J␀␡␍"),
        ("a\u202eb\u2066c\u200b", "a⟨U+202E⟩b⟨U+2066⟩c⟨U+200B⟩"),
        ("\x85\ud800", "⟨U+0085⟩⟨U+D800⟩"),
        ("שלום 日本 🌊", "שלום 日本 🌊"),
    ],
)
def test_invisible_characters_are_written_out(text: str, expected: str) -> None:
    assert formats.visible(text) == expected


@given(st.text())
def test_nothing_that_is_visible_hides_or_reorders(text: str) -> None:
    shown = formats.visible(text)
    assert not {unicodedata.category(c) for c in shown if c not in "\n\t"} & {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}
    assert formats.visible(shown) == shown


def test_an_excerpt_is_one_line_and_marks_omitted_text() -> None:
    assert formats.excerpt("a\n b\t\x07", 10) == "a b ␇"
    assert formats.excerpt("x" * 30, 10) == "x" * 10 + "…"
    assert formats.excerpt(" " * 100 + "x", 10) == "…"
