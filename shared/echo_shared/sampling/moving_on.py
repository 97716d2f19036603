"""Rule for switching running completions to a newer policy version; real and simulated nodes share it.

After a switch, the engine must prefill everything drawn so far under the new version. Therefore
- completions that end within `ENDS_S` at the engine's speed keep their version;
- prefilling takes at most `READING_SHARE` of the node's time, however often versions are published.
"""

from __future__ import annotations

from typing import Final

ENDS_S: Final = 2.0
READING: Final = 1 / 16
"""Cost of prefilling one token, as a share of the cost of drawing one."""
READING_SHARE: Final = 1 / 5


class MovingOn:
    """Decides when to switch: ask `is_due`, and report each switch with `moved`."""

    def __init__(self) -> None:
        self.not_before = 0.0
        """Time before which no further switch is due, so that prefilling keeps to READING_SHARE of the node's time."""

    def is_due(self, left_tokens: int, *, token_s: float, now: float) -> bool:
        """Return True if switching to the newer version is worthwhile now.

        `left_tokens`: the most tokens that a running completion may still draw; `token_s`: seconds per drawn token, 0 =
        unknown.
        """
        return now >= self.not_before and (token_s == 0.0 or left_tokens * token_s > ENDS_S)

    def moved(self, read_tokens: int, *, tokens_per_s: float, now: float) -> None:
        """Note a switch at `now` that prefills `read_tokens`, prompts included. The engine draws `tokens_per_s`; 0 =
        unknown.
        """
        if tokens_per_s:
            self.not_before = now + read_tokens * READING / tokens_per_s / READING_SHARE
