"""Reward components for any task: the format and the length of a completion.

All values are in 0..1. They depend on a completion's text or token count, never on the problem.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol


class TextComponent(Protocol):
    """A reward component that depends only on a completion's text and length."""

    def value(self, completion: str, num_tokens: int) -> float:
        """Return the component's value, in 0..1, for a completion (decoded, without special tokens) with `num_tokens`
        drawn tokens."""


@dataclass(frozen=True, slots=True)
class Format:
    """A component with value 1 if the pattern matches the whole completion without surrounding blanks, else 0."""

    pattern: re.Pattern[str]

    @classmethod
    def of(cls, pattern: str) -> Format:
        """Compile the pattern. In it, a dot matches any character, including newlines. Raises re.error."""
        return cls(re.compile(pattern, re.DOTALL))

    def value(self, completion: str, num_tokens: int) -> float:
        return float(self.pattern.fullmatch(completion.strip()) is not None)


@dataclass(frozen=True, slots=True)
class Tagged:
    """A component with value 1 if the completion contains exactly one `<tag>...</tag>` and the tag has content,
    else 0."""

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
    """A component with value 1 from `least` to `most` tokens. Below `least`, the value falls linearly to 0 at 0 tokens;
    above `most`, to 0 at `zero` tokens.

    The upper side is DAPO's soft overlong punishment, https://arxiv.org/abs/2503.14476, section 3.4, shifted to 0..1.
    """

    least: int = 0
    most: int = 0
    """Largest number of tokens with value 1. 0 means no upper limit."""
    zero: int = 0
    """Number of tokens, above `most`, at which the value reaches 0. The default 0 stands for twice `most`."""

    def value(self, completion: str, num_tokens: int) -> float:
        if num_tokens < self.least:
            return num_tokens / self.least
        if not self.most or num_tokens <= self.most:
            return 1.0
        zero = self.zero or 2 * self.most
        return max(0.0, (zero - num_tokens) / (zero - self.most))
