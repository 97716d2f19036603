"""The live view on a terminal: the node's snapshot, redrawn in place, cut to the terminal's size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from echo_node.panel import NodeSnapshot, Panel, PlainPanel, rows

LIVE_PER_S: Final = 4
NARROW: Final = 60
"""Terminal width, in columns, below which values stand under their names."""
BAR: Final = 40
"""Maximum width of a bar, in columns."""
MOST_SHOWN: Final = 400
"""Maximum characters of one value, because some values come from other machines."""
KEYS: Final = "Ctrl-C ends it. Elsewhere: echo-node pause, status, page, finish"
"""Text of the row "keys". The row must stay below 80 columns, because the terminal itself writes ^C after it."""
RISING: Final = "▁▂▃▄▅▆▇█"
RISING_ASCII: Final = "_.-=+*%#"
COLOURS: Final = {
    "sampling": "green",
    "waiting": "green",
    "fetching": "cyan",
    "preparing": "cyan",
    "connecting": "cyan",
    "standby": "yellow",
    "paused": "yellow",
    "finishing": "yellow",
    "not connected": "red",
}
"""Colours of the states. The state is always shown in words as well."""
GOES_FIRST: Final = (
    *("hub's key", "asks for", "checked", "keys", "node", "policy", "hub", "page", "device", "lease", "credit"),
)
"""Rows that are left out on a small terminal, in this order. Rows that are not named here always stay."""


class LivePanel:
    """A panel that redraws the newest snapshot `LIVE_PER_S` times a second."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def update(self, snapshot: NodeSnapshot) -> None:
        self._live.update(View(snapshot))


@contextmanager
def open_panel(console: Console, *, quiet: bool) -> Iterator[Panel]:
    """Yield the panel for this output. A live panel needs a terminal with cursor movement."""
    if quiet or not console.is_terminal or console.is_dumb_terminal:
        yield PlainPanel()
        return
    with Live(console=console, refresh_per_second=LIVE_PER_S, transient=True) as live:
        yield LivePanel(live)


class View:
    """A snapshot, laid out for the terminal's current size."""

    def __init__(self, snapshot: NodeSnapshot) -> None:
        self._snapshot = snapshot

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        parts = self._parts(options)
        room = console.size.height - 1
        lines = {name: len(console.render_lines(part, options, pad=False)) for name, part in parts.items()}
        for name in GOES_FIRST:
            if sum(lines[name] for name in parts) <= room:
                break
            parts.pop(name, None)
        yield Group(*parts.values())

    def _parts(self, options: ConsoleOptions) -> dict[str, RenderableType]:
        """Return the parts by name, in display order. Values with the same name form one part."""
        values: dict[str, list[Text]] = {}
        for name, value in (*rows(self._snapshot), ("keys", KEYS)):
            # Use Text: a plain string could be read as markup.
            values.setdefault(name, []).append(Text(value[:MOST_SHOWN], overflow="fold"))
        parts: dict[str, RenderableType] = {"state": self._state(options)}
        for name, texts in values.items():
            if name != "state":
                extra = self._beside(name, options)
                parts[name] = _row(name, [part for text in texts for part in (text, *extra)], options)
        for name, amounts in (("fetching", self._snapshot.fetching), ("preparing", self._snapshot.preparing)):
            if bars := self._bars(name, amounts, options):
                parts[name] = bars
        return parts

    def _state(self, options: ConsoleOptions) -> Text:
        state, reason = self._snapshot.state, dict(rows(self._snapshot))["state"]
        mark = "*" if options.ascii_only else "●"
        text = Text(f"{mark} {reason[:MOST_SHOWN]}", overflow="fold")
        text.stylize(f"bold {COLOURS.get(state, '')}".strip(), 0, len(mark) + 1 + len(state))
        return text

    def _beside(self, name: str, options: ConsoleOptions) -> list[RenderableType]:
        """Return the drawings for the value `name`: a bar, a sparkline (a line of bars), or none."""
        snapshot = self._snapshot
        if name == "lease" and snapshot.held_rollouts:
            return [_bar(snapshot.lease_tokens, snapshot.lease_most_tokens, options)]
        if name == "speed" and snapshot.token_rates:
            line = sparkline(snapshot.token_rates[-_room(options) :], RISING_ASCII if options.ascii_only else RISING)
            return [Text(line, style="green")]
        return []

    def _bars(
        self, name: str, amounts: Mapping[str, tuple[int, int]], options: ConsoleOptions
    ) -> RenderableType | None:
        texts = [value for row, value in rows(self._snapshot) if row == name]
        if not texts:
            return None
        bars = [_bar(done, total, options) for done, total in amounts.values()]
        both = [part for text, bar in zip(texts, bars, strict=True) for part in (Text(text, overflow="fold"), bar)]
        return _row(name, both, options)


def sparkline(values: Sequence[float], rising: str = RISING) -> str:
    """Return one character per value, scaled to the maximum. The lowest character means 0."""
    most = max(values, default=0.0)
    if most <= 0:
        return rising[0] * len(values)
    return "".join(rising[min(len(rising) - 1, round(value / most * (len(rising) - 1)))] for value in values)


def _row(name: str, values: Sequence[RenderableType], options: ConsoleOptions) -> RenderableType:
    if options.max_width < NARROW:
        return Group(Text(name, style="dim"), *values)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(width=9)
    grid.add_column()
    grid.add_row(Text(name, style="dim"), Group(*values))
    return grid


def _bar(done: int, total: int, options: ConsoleOptions) -> ProgressBar:
    return ProgressBar(total=max(1, total), completed=done, width=_room(options))


def _room(options: ConsoleOptions) -> int:
    return max(1, min(BAR, options.max_width - (0 if options.max_width < NARROW else 12)))
