import io
from dataclasses import replace
from typing import Any, get_args

import pytest
from rich.cells import cell_len
from rich.console import Console

from echo_node.condition import State, described
from echo_node.live_view import COLOURS, GOES_FIRST, LivePanel, View, open_panel, sparkline
from echo_node.panel import NodeSnapshot, PlainPanel, rows
from tests.echo_node.test_device_rows import shown, work
from tests.echo_node.test_panel import SNAPSHOT, TOTALS

FULL = described(
    replace(
        SNAPSHOT,
        totals=TOTALS,
        page="http://127.0.0.1:8710/leaderboard?node=abc",
        lease_tokens=900,
        lease_most_tokens=3_072,
        token_rates=(0.0, 400.0, 800.0),
        arrived_by="inline, 12.3 kB in 0.2 s",
        cost_per_hour=0.4,
    ),
    is_finishing=False,
)


class Screen(io.TextIOWrapper):
    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding)

    @property
    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


def drawn(snapshot: NodeSnapshot, width: int = 80, height: int = 24, encoding: str = "utf-8", **options: Any) -> str:
    screen = Screen(encoding)
    console = Console(file=screen, force_terminal=True, width=width, height=height, _environ={}, **options)
    console.print(View(snapshot))
    return screen.text


@pytest.mark.parametrize(("width", "height"), [(120, 50), (80, 24), (60, 24), (59, 24), (40, 24), (40, 10), (20, 8)])
def test_the_view_fits_any_size_and_shows_the_state(width: int, height: int) -> None:
    text = drawn(FULL, width, height, no_color=True, color_system=None)
    lines = text.rstrip("\n").split("\n")
    assert "sampling" in lines[0]
    assert all(cell_len(line) <= width for line in lines)
    assert len(lines) < height or not any(line.strip() in GOES_FIRST for line in lines)


def test_a_usual_terminal_shows_all_that_matters() -> None:
    words = " ".join(drawn(FULL, no_color=True, color_system=None).split())
    for part in (
        "Drawing 3 rollouts with policy version 12.",
        "inline, 12.3 kB in 0.2 s",
        "3 rollouts, 900 of at most 3,072 tokens",
        "640 tokens/s in the last minute; its engine can do 812",
        "▁▅█",
        "40 trained",
        "39,544 trained (5,139,912 tokens)",
        "3 of 57",
        "leaderboard?node=abc",
        "Policy version 13: 0.5 of 1.5 MB (33 %)",
        "━━━",
        "Ctrl-C",
        "echo-node pause",
    ):
        assert part in words, part


def test_a_conversion_has_a_bar() -> None:
    preparing = replace(FULL, fetching={}, preparing={"The base model, converted": (1_000_000, 4_000_000)})
    words = " ".join(drawn(preparing, no_color=True, color_system=None).split())
    assert "preparing The base model, converted: 1.0 of 4.0 MB (25 %) ━━━" in words


def test_colours_and_unicode_are_used_only_if_supported() -> None:
    plain = drawn(FULL, no_color=True, color_system=None, encoding="ascii")
    assert "\x1b" not in plain and plain.isascii()
    assert "* sampling" in plain and "_+#" in plain
    assert "\x1b[" in drawn(FULL)


def test_words_from_outside_are_neither_markup_nor_control_characters() -> None:
    hostile = "[red]x[/red] [/] \x1b[2J\x07‮"
    snapshot = replace(
        FULL, run_name=hostile, reason=hostile, standby=hostile, totals={**TOTALS, "dropped": {hostile: 1}}
    )
    text = drawn(snapshot, 200, 50, no_color=True, color_system=None)
    assert "[red]x[/red] [/]" in text
    assert not any(char in text for char in "\x1b\x07‮")


def test_long_words_from_outside_leave_room() -> None:
    text = drawn(replace(FULL, state="standby", reason="word " * 400), no_color=True, color_system=None)
    assert "receipts" in text and "Ctrl-C" in text


def test_every_state_has_a_colour() -> None:
    assert set(COLOURS) == set(get_args(State))


def test_parts_that_may_be_left_out_exist() -> None:
    device = shown(work("cuda:0"))
    paid = replace(FULL, rollouts={**FULL.rollouts, "checked:passed": 1}, devices=(device,))
    assert set(GOES_FIRST) <= {name for name, _ in rows(paid)} | {"keys"}


def test_sparklines_rise_with_their_values() -> None:
    assert sparkline([0.0, 1.0, 2.0], "abc") == "abc"
    assert sparkline([0.0, 0.0], "abc") == "aa"
    assert sparkline([], "abc") == ""


@pytest.mark.parametrize(
    ("options", "quiet", "kind"),
    [
        ({"force_terminal": True}, False, LivePanel),
        ({"force_terminal": True}, True, PlainPanel),
        ({"force_terminal": False}, False, PlainPanel),
        ({"force_terminal": True, "_environ": {"TERM": "dumb"}}, False, PlainPanel),
    ],
)
def test_the_panel_suits_where_the_output_goes(options: dict[str, Any], quiet: bool, kind: type) -> None:
    console = Console(file=io.StringIO(), width=80, **{"_environ": {"TERM": "xterm"}, **options})
    with open_panel(console, quiet=quiet) as shown:
        assert isinstance(shown, kind)
        shown.update(FULL)


def test_the_view_leaves_nothing_on_the_terminal() -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=80, height=24, _environ={"TERM": "xterm"})
    with open_panel(console, quiet=False) as shown:
        shown.update(FULL)
    assert "sampling" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K"), "the lines are cleared"
