"""When what is drawn by an older version is worth going on with by a newer one, in mid-completion: the node's rule,
which simulated nodes follow too.

The engine then reads again all that was drawn so far, under the new version, before it draws on. So
- what ends within `ENDS_S` anyhow, at the engine's pace, is let end by the version that it has;
- of the node's time, reading again takes no more than `READING_SHARE`, however often versions are published.
"""

from __future__ import annotations

from typing import Final

ENDS_S: Final = 2.0
READING: Final = 1 / 16
"""What it costs to read a token, over what it costs to draw one."""
READING_SHARE: Final = 1 / 5


class MovingOn:
    """`is_due` is asked, `moved` told."""

    def __init__(self) -> None:
        self.not_before = 0.0
        """Reading has its share of the time until then."""

    def is_due(self, left_tokens: int, *, token_s: float, now: float) -> bool:
        """Whether to break in: the completions that run have `left_tokens` to go at most, the longest of them, which
        take `token_s` each; 0 = not known."""
        return now >= self.not_before and (token_s == 0.0 or left_tokens * token_s > ENDS_S)

    def moved(self, read_tokens: int, *, tokens_per_s: float, now: float) -> None:
        """So many tokens, prompts included, are read again; the engine draws `tokens_per_s`, 0 = not known."""
        if tokens_per_s:
            self.not_before = now + read_tokens * READING / tokens_per_s / READING_SHARE
