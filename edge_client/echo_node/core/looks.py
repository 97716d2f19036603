"""Content of the node's icon in the desktop's tray: state, colour, sentence, and the buttons that can be used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

TOOLTIP: Final = 120
"""Maximum characters of the icon's tooltip; Windows allows 128."""
NOT_RUNNING: Final = "not running"
START: Final = "Start it with: echo-node run"
COLOURS: Final = {
    "sampling": "#1f9d55",
    "waiting": "#1f9d55",
    "fetching": "#2f7bd0",
    "preparing": "#2f7bd0",
    "connecting": "#2f7bd0",
    "standby": "#d79a1e",
    "paused": "#d79a1e",
    "finishing": "#d79a1e",
    "not connected": "#c9362c",
    NOT_RUNNING: "#80868b",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class IconLook:
    state: str
    reason: str
    is_running: bool
    is_paused: bool
    """True if the owner has paused the node."""

    @property
    def title(self) -> str:
        text = f"Echo: {self.state}. {self.reason}"
        return text if len(text) <= TOOLTIP else f"{text[: TOOLTIP - 1]}…"

    @property
    def colour(self) -> str:
        return COLOURS.get(self.state, COLOURS["connecting"])

    @property
    def has_bars(self) -> bool:
        """True if the icon shows two bars, so that a pause is visible without colours."""
        return self.state in ("paused", "standby", "finishing")


def look_of(status: Mapping[str, Any] | None, last_word: str = "") -> IconLook:
    """Return the tray icon's look for `status`, the output of `echo-node status --json`. None = no node runs;
    `last_word` is then the reason why the last node ended, if known.
    """
    if status is None:
        return IconLook(state=NOT_RUNNING, reason=last_word or START, is_running=False, is_paused=False)
    return IconLook(
        state=str(status["state"]),
        reason=str(status["reason"]),
        is_running=True,
        is_paused="paused" in status["holds"],
    )
