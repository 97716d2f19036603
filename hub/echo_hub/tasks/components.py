"""Components of a reward that can stand beside any task's score: the form of a completion, and its length.

All are in 0..1, and read a completion's text or its number of tokens, never the problem.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol


class TextComponent(Protocol):
    """One component."""

    def value(self, completion: str, num_tokens: int) -> float:
        """Of a completion (decoded, no special tokens) of so many drawn tokens; 0..1."""


@dataclass(frozen=True, slots=True)
class Format:
    """1 where the pattern matches the whole completion but for white space around it, else 0."""

    pattern: re.Pattern[str]

    @classmethod
    def of(cls, pattern: str) -> Format:
        """A dot is any character, line ends too. Raises re.error."""
        return cls(re.compile(pattern, re.DOTALL))

    def value(self, completion: str, num_tokens: int) -> float:
        return float(self.pattern.fullmatch(completion.strip()) is not None)


@dataclass(frozen=True, slots=True)
class Tagged:
    """1 where there is exactly one `<tag>...</tag>`, with text in it, else 0."""

    tag: str

    def value(self, completion: str, num_tokens: int) -> float:
        opening, closing = f"<{self.tag}>", f"</{self.tag}>"
        if completion.count(opening) != 1 or completion.count(closing) != 1:
            return 0.0
        _, _, rest = completion.partition(opening)
        inner, is_closed, _ = rest.partition(closing)
        return float(bool(is_closed) and bool(inner.strip()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """1 from `least` to `most` tokens; below it falls to 0 at no tokens, above in a straight line to 0 at `zero`.

    The upper side is the soft punishment of long completions of DAPO, https://arxiv.org/abs/2503.14476, section 3.4,
    moved to 0..1.
    """

    least: int = 0
    most: int = 0
    """0 = no end."""
    zero: int = 0
    """More than `most`; 0 = twice that."""

    def value(self, completion: str, num_tokens: int) -> float:
        if num_tokens < self.least:
            return num_tokens / self.least
        if not self.most or num_tokens <= self.most:
            return 1.0
        zero = self.zero or 2 * self.most
        return max(0.0, (zero - num_tokens) / (zero - self.most))
