"""Rule for switching unfinished completions to a newer policy version, for real and simulated nodes.

After a switch, the engine must prefill prompts and drawn tokens under the new version. Therefore
- no switch happens when all completions would end within `ENDS_S` seconds;
- prefilling takes at most `READING_SHARE` of the node's time, however often versions are published.
"""

from __future__ import annotations

from typing import Final

ENDS_S: Final = 2.0
READING: Final = 1 / 16
"""Cost of prefilling one token, relative to the cost of drawing one."""
READING_SHARE: Final = 1 / 5


class MovingOn:
    """Decides when a node switches its unfinished completions to a newer version. Ask `is_due`, and report each switch
    to `moved`.
    """

    def __init__(self) -> None:
        self.not_before = 0.0
        """Time before which no further switch may happen, so that prefilling stays within READING_SHARE."""

    def is_due(self, left_tokens: int, *, token_s: float, now: float) -> bool:
        """Return True if a switch to the newer version is worthwhile now.

        `left_tokens`: tokens that the longest completion may still draw; `token_s`: seconds per drawn token, 0 =
        unknown.
        """
        return now >= self.not_before and (token_s == 0.0 or left_tokens * token_s > ENDS_S)

    def moved(self, read_tokens: int, *, tokens_per_s: float, now: float) -> None:
        """Record a switch at `now` that prefills `read_tokens`, prompts included. `tokens_per_s`: the engine's drawing
        speed, 0 = unknown.
        """
        if tokens_per_s:
            self.not_before = now + read_tokens * READING / tokens_per_s / READING_SHARE
