"""The view that is alive on a terminal: the snapshot, redrawn in place, as much of it as there is room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
"""Columns; below that, values stand under their names."""
BAR: Final = 40
"""Columns of a bar at most."""
MOST_SHOWN: Final = 400
"""Characters of one value: some are another's words."""
KEYS: Final = "Ctrl-C ends it. Elsewhere: echo-node pause, status, page, finish"
"""Short of 80 columns with its name: the terminal itself writes ^C behind it."""
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
"""Of the states; what they say stands in words beside them."""
GOES_FIRST: Final = ("hub's key", "asks for", "checked", "keys", "node", "policy", "hub", "page", "lease", "credit")
"""What is left out where there is no room for all, in this order; the others stay."""


class LivePanel:
    """The newest snapshot, redrawn `LIVE_PER_S` times a second."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def update(self, snapshot: NodeSnapshot) -> None:
        self._live.update(View(snapshot))


@contextmanager
def open_panel(console: Console, *, quiet: bool) -> Iterator[Panel]:
    """The panel that suits where the output goes: one that redraws itself needs a terminal that can move its cursor."""
    if quiet or not console.is_terminal or console.is_dumb_terminal:
        yield PlainPanel()
        return
    with Live(console=console, refresh_per_second=LIVE_PER_S, transient=True) as live:
        yield LivePanel(live)


class View:
    """A snapshot that lays itself out anew for each size that the terminal has."""

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
        """By name, in the order in which they stand; where a name comes twice, its values are one part."""
        values: dict[str, list[Text]] = {}
        for name, value in (*rows(self._snapshot), ("keys", KEYS)):
            values.setdefault(name, []).append(Text(value[:MOST_SHOWN], overflow="fold"))  # Text: it is not markup.
        parts: dict[str, RenderableType] = {"state": self._state(options)}
        for name, texts in values.items():
            if name != "state":
                extra = self._beside(name, options)
                parts[name] = _row(name, [part for text in texts for part in (text, *extra)], options)
        if bars := self._fetching(options):
            parts["fetching"] = bars
        return parts

    def _state(self, options: ConsoleOptions) -> Text:
        state, reason = self._snapshot.state, dict(rows(self._snapshot))["state"]
        mark = "*" if options.ascii_only else "●"
        text = Text(f"{mark} {reason[:MOST_SHOWN]}", overflow="fold")
        text.stylize(f"bold {COLOURS.get(state, '')}".strip(), 0, len(mark) + 1 + len(state))
        return text

    def _beside(self, name: str, options: ConsoleOptions) -> list[RenderableType]:
        """What shows a value without words."""
        snapshot = self._snapshot
        if name == "lease" and snapshot.held_rollouts:
            return [_bar(snapshot.lease_tokens, snapshot.lease_most_tokens, options)]
        if name == "speed" and snapshot.token_rates:
            line = sparkline(snapshot.token_rates[-_room(options) :], RISING_ASCII if options.ascii_only else RISING)
            return [Text(line, style="green")]
        return []

    def _fetching(self, options: ConsoleOptions) -> RenderableType | None:
        texts = [value for name, value in rows(self._snapshot) if name == "fetching"]
        if not texts:
            return None
        bars = [_bar(done, total, options) for done, total in self._snapshot.fetching.values()]
        both = [part for text, bar in zip(texts, bars, strict=True) for part in (Text(text, overflow="fold"), bar)]
        return _row("fetching", both, options)


def sparkline(values: Sequence[float], rising: str = RISING) -> str:
    """One character a value: the lowest for none at all, the highest for the most of them."""
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
