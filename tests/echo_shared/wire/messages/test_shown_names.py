from __future__ import annotations

import unicodedata

import pytest

from echo_shared.wire.messages.shown_names import checked_name, fault_of, looks_of

FINE = [
    *(
        "Ada",
        "Ада",
        "node-0123abcd",
        "O'Brien's PC",
        "日本語のノード 🌊",
        "W" * 64,
        "andré",
        "Nguyễn",
        "❤\ufe0f",
        "١٢٣",
    ),
    *("my-hub-laptop", "GitHub runner", "badminton", "hubert", "Echo", "team 7", "<script>alert(1)</script>", "coop"),
]
HIDDEN = [
    *("\u200b", "\u200d", "\u2060", "\ufeff", "\u00ad", "\u034f", "\u061c", "\u115f", "\u1160", "\u180e", "\u3164"),
    *("\uffa0", "\u2800", "\ufe0f", "\U000e0100", "\U000e0041", "\u202a", "\u202e", "\u2066", "\u2069", "\u200e"),
    *("\x00", "\x1b", "\x7f", "\n", "\t", "\x85", "\u2028", "\u2029", "\ue000", "\ufff9"),
]
OF_THE_HUB = [
    *("hub", "The Hub", "HUB", "hub-2", "h u b", "echo hub", "ＨＵＢ", "hυb", "hub team"),
    *("admin", "Admin 1", "аdmin", "adm1n", "AdmIn", "adrnin", "ádmin", "ᴀᴅᴍɪɴ", "🅰🅳🅼🅸🅽", "administrator", "x admin"),
    *(
        "operator",
        "0perator",
        "ｏｐｅｒａｔｏｒ",
        "𝐨perator",
        "operatоr's laptop",
        "hub-operator",
        "moderator",
        "theadmin",
    ),
]
ALIKE = [
    *(("Ada", "Аda"), ("Ada", "ADA"), ("Ada", " Ada  "), ("Ada B", "Ada\u00a0B"), ("Ilya", "llya"), ("Bob", "В0b")),
    *(("mary", "rnary"), ("node-1", "node‐l"), ("paypal", "раураl"), ("café", "cafe\u0301"), ("①", "1"), ("ﬁx", "fix")),
]
UNLIKE = [("kai", "kal"), ("Ada", "Eda"), ("node-1", "node-2"), ("andre", "andré"), ("名前", "名")]


@pytest.mark.parametrize("name", FINE)
def test_names_of_people_and_machines_are_fine(name: str) -> None:
    assert fault_of(name) == "" and checked_name(name) == name


@pytest.mark.parametrize("char", HIDDEN, ids=lambda char: f"{ord(char):X}")
@pytest.mark.parametrize("around", ["{}Ada", "A{}da", "Ada{}"])
def test_a_character_that_hides_or_reverses_text_is_named(char: str, around: str) -> None:
    assert f"remove U+{ord(char):04X}" in fault_of(around.format(char))


def test_nothing_that_python_does_not_print_is_left() -> None:
    shown = [chr(number) for number in range(0x11_0000) if not fault_of(f"A{chr(number)}")]
    assert all(char.isprintable() or unicodedata.category(char) == "Zs" for char in shown)


@pytest.mark.parametrize("name", OF_THE_HUB)
def test_a_name_that_imitates_the_hub_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="hub or its operator"):
        checked_name(name)


@pytest.mark.parametrize("name", ["Z\u0351\u036b\u0343algo", "...", " ", "-", "\u0301"])
def test_accents_in_piles_and_names_of_nothing_are_refused(name: str) -> None:
    assert fault_of(name).startswith("a name ")


@pytest.mark.parametrize(("one", "other"), ALIKE)
def test_names_that_look_alike_share_a_look(one: str, other: str) -> None:
    assert looks_of(one) & looks_of(other)


@pytest.mark.parametrize(("one", "other"), UNLIKE)
def test_names_that_do_not_share_none(one: str, other: str) -> None:
    assert not looks_of(one) & looks_of(other)
