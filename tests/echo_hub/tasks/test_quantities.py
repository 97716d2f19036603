from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_hub.tasks.quantities import is_same_quantity, read_quantity

PIECES = [
    "1",
    "23",
    ".",
    ",",
    "-",
    "/",
    " ",
    "e",
    "^",
    "{",
    "}",
    "\\frac",
    "\\,",
    "%",
    "$",
    "cm",
    "m",
    "apples",
    "(",
    ")",
    "½",
]


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_a_fraction_is_read_exactly(above: int, below: int) -> None:
    for text in (f"{above}/{below}", f"\\frac{{{above}}}{{{below}}}", f"${above} / {below}$"):
        read = read_quantity(text)
        assert read is not None
        assert read.value == Fraction(above, below)


@given(st.decimals(allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9))
def test_a_decimal_is_read_exactly(number: object) -> None:
    for text in (f"{number:f}", f"{number:,f}", f"{number:E}"):
        read = read_quantity(text)
        assert read is not None
        assert read.value == Fraction(f"{number:f}")


@given(st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_any_other_text_is_a_number_or_none(text: str) -> None:
    read = read_quantity(text)
    assert read is None or is_same_quantity(read, read)


@given(st.text(max_size=30).map(lambda unit: f"5 {unit}"), st.text(max_size=30).map(lambda unit: f"5 {unit}"))
def test_any_words_may_stand_for_a_unit(one: str, other: str) -> None:
    read = [quantity for text in (one, other, "5 cm") if (quantity := read_quantity(text)) is not None]
    for answer in read:
        for expected in read:
            assert isinstance(is_same_quantity(answer, expected), bool)


@pytest.mark.parametrize(
    "unit", ["cm^", "m**9", "m^-9", "per", "per per", "m/", "°C", "delta", "sq", "µ", "in in in", "%%", "a b"]
)
def test_misspelled_units_are_a_unit_or_none(unit: str) -> None:
    read = read_quantity(f"5 {unit}")
    centimetres = read_quantity("5 cm")
    assert centimetres is not None
    assert read is None or not is_same_quantity(read, centimetres)


@pytest.mark.parametrize("gap", [" ", "  ", " - ", "  /  ", "^2  ", "\\cdot ", " \n\t "])
def test_two_hundred_characters_are_read_quickly(gap: str) -> None:
    """Check the time: trying all ways to split this text into units would never end."""
    assert read_quantity(f"5 a{f'{gap}b' * 200}"[:198] + "!") is None


@pytest.mark.parametrize("unit", ["dB", "dBm", "neper", "octave", "bel", "W", "degC"])
@pytest.mark.parametrize("other", ["W", "dBm", "degF", "m"])
def test_level_units_are_no_multiples_of_other_units(unit: str, other: str) -> None:
    one, another = read_quantity(f"5 {unit}"), read_quantity(f"5 {other}")
    assert one is not None
    assert another is not None
    assert is_same_quantity(one, another) == (unit == other)


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [("100 °C", "212 °F", True), ("100 °C", "100 °F", False), ("20 °C", "293.15 K", True), ("20 °C", "20 K", False)],
)
def test_temperatures_begin_at_different_places(one: str, other: str, is_same: bool) -> None:
    temperature, another = read_quantity(one), read_quantity(other)
    assert temperature is not None
    assert another is not None
    assert is_same_quantity(temperature, another) is is_same


@pytest.mark.parametrize(
    ("compound", "other", "is_same"),
    [
        ("1 hour 30 minutes", "1.5 hours", True),
        ("1h30m", "90 min", True),
        ("2 hours and 15 minutes", "135 minutes", True),
        ("5'10\"", "70 inches", True),
        ("3 lb, 4 oz", "52 oz", True),
        ("1 hour 30 minutes", "1.3 hours", False),
        ("5 feet 10 inches", "5 feet", False),
    ],
)
def test_parts_of_ever_smaller_units_add_up(compound: str, other: str, is_same: bool) -> None:
    one, another = read_quantity(compound), read_quantity(other)
    assert one is not None
    assert another is not None
    assert is_same_quantity(one, another) is is_same
    assert is_same_quantity(another, one) is is_same


@pytest.mark.parametrize("text", ["3 boys 4 girls", "30 minutes 1 hour", "1 hour 2 hours", "5 m 3 kg"])
def test_other_parts_are_no_quantity(text: str) -> None:
    assert read_quantity(text) is None


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        ("3 red apples", "3 apples", True),
        ("3 red apples", "3 green apples", False),
        ("3 boys per class", "3 girls per class", False),
        ("18 foos per hour", "18 km per hour", False),
    ],
)
def test_counted_things_match_by_all_words_of_one(one: str, other: str, is_same: bool) -> None:
    things, others = read_quantity(one), read_quantity(other)
    assert things is not None
    assert others is not None
    assert is_same_quantity(things, others) is is_same
