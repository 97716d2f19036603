from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.core.schedule import DAYS, Schedule
from echo_shared.errors import ConfigError

MONDAY = 2  # 2 November 2026 is a Monday.


def at(day: str, clock: str) -> datetime:
    hour, minute = map(int, clock.split(":"))
    return datetime(2026, 11, MONDAY + DAYS.index(day), hour, minute)


@pytest.mark.parametrize(
    ("text", "within", "without"),
    [
        ("mon-fri 22:00-07:00", ["mon 22:00", "tue 06:59", "sat 06:59"], ["mon 06:59", "mon 21:59", "sat 22:00"]),
        ("20:00-06:00", ["sun 23:59", "mon 05:59"], ["mon 06:00", "wed 19:59"]),
        ("sat", ["sat 00:00", "sat 23:59"], ["fri 23:59", "sun 00:00"]),
        ("fri-mon 09:00-17:00", ["fri 09:00", "mon 16:59"], ["tue 09:00", "thu 12:00", "fri 17:00"]),
        ("sun 22:00-24:00", ["sun 23:59"], ["mon 00:00", "sun 21:59"]),
        ("00:00-24:00", ["wed 00:00", "wed 23:59"], []),
        ("Tue 09:00-09:00", ["tue 09:00", "wed 08:59"], ["wed 09:00"]),
    ],
)
def test_a_span_is_its_days_from_beginning_to_end(text: str, within: list[str], without: list[str]) -> None:
    schedule = Schedule.parse([text])
    assert [moment for moment in within if not schedule.level(at(*moment.split()))] == []
    assert [moment for moment in without if schedule.level(at(*moment.split()))] == []


def test_several_are_joined_and_none_is_always() -> None:
    schedule = Schedule.parse(["mon 01:00-02:00", "wed"])
    assert schedule.level(at("mon", "01:30")) and schedule.level(at("wed", "13:00"))
    assert not schedule.level(at("mon", "02:00"))
    assert Schedule().level(at("mon", "02:00")) and Schedule().next_begin(at("mon", "02:00")) == ""


def test_a_schedule_says_when_the_next_span_begins() -> None:
    schedule = Schedule.parse(["mon-fri 22:00-07:00", "sat"])
    assert schedule.next_begin(at("mon", "08:00")) == "mon 22:00"
    assert schedule.next_begin(at("fri", "23:00")) == "sat 00:00"
    assert schedule.next_begin(at("sun", "00:00")) == "mon 22:00"


def test_a_level_says_how_much_and_the_last_span_counts() -> None:
    schedule = Schedule.parse(["22:00-07:00", "07:00-22:00 25%", "sat 50 %"])
    moments = ("mon 06:59", "mon 07:00", "mon 21:59", "mon 22:00", "sat 03:00", "sat 12:00", "sun 03:00")
    assert [schedule.level(at(*moment.split())) for moment in moments] == [1.0, 0.25, 0.25, 1.0, 0.5, 0.5, 1.0]
    assert Schedule.parse(["25%", "22:00-07:00"]).level(at("mon", "23:00")) == 1.0
    assert Schedule.parse(["22:00-07:00", "25%"]).level(at("mon", "23:00")) == 0.25
    office = Schedule.parse(["100%", "mon-fri 09:00-17:00 0%"])
    assert [office.level(at("fri", clock)) for clock in ("08:59", "09:00", "17:00")] == [1.0, 0.0, 1.0]
    assert office.next_begin(at("fri", "10:00")) == "fri 17:00"


def test_a_schedule_says_when_the_level_changes() -> None:
    schedule = Schedule.parse(["22:00-07:00", "07:00-22:00 25%", "sat-sun 50%"])
    until = {moment: schedule.until(at(*moment.split())) for moment in ("mon 12:00", "mon 22:00", "fri 23:00")}
    assert until == {"mon 12:00": "22:00", "mon 22:00": "07:00", "fri 23:00": "00:00"}
    assert schedule.until(at("sat", "00:00")) == "mon 00:00"
    assert Schedule().until(at("mon", "12:00")) == Schedule.parse(["30%"]).until(at("mon", "12:00")) == ""


@given(
    st.text(max_size=20)
    | st.from_regex(r"(mon|tue|xyz)?(-fri|-zzz)? ?\d\d?:\d\d-\d\d?:\d\d( \d?\d\d%)?", fullmatch=True)
)
def test_any_text_is_a_schedule_or_refused(text: str) -> None:
    try:
        schedule = Schedule.parse([text])
    except ConfigError as error:
        assert error.got in (repr(text), text) and error.do
        return
    assert schedule.spans and all(0 < span.length <= 1_440 and 0 <= span.level <= 1 for span in schedule.spans)


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "mon-",
        "mon 25:00-01:00",
        "mon 10:60-11:00",
        "mon10:00-11:00",
        "monday",
        "-",
        "101%",
        "25",
        "%",
        "mon25%",
    ],
)
def test_an_invalid_schedule_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a valid time span of a week"):
        Schedule.parse([text])


@pytest.mark.parametrize("texts", [["0%"], ["mon 10:00-12:00", "0%"]])
def test_a_schedule_without_working_hours_is_refused(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="leaves no time to work"):
        Schedule.parse(texts)
