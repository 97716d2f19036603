"""Version spans: the policy versions that drew a completion's tokens, in token order. Tokens drawn with the versions
(7, 7, 7, 9, 9) are two spans: 3 tokens with version 7, 2 tokens with version 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from echo_shared.wire.messages import VersionSpan

Spans = tuple[VersionSpan, ...]


def num_tokens(spans: Sequence[VersionSpan]) -> int:
    return sum(span.num_tokens for span in spans)


def grown(spans: Spans, policy_version: int, more_tokens: int) -> Spans:
    if more_tokens == 0:
        return spans
    if spans and spans[-1].policy_version == policy_version:
        more_tokens += spans[-1].num_tokens
        spans = spans[:-1]
    return (*spans, VersionSpan(policy_version=policy_version, num_tokens=more_tokens))


def between(spans: Spans, start: int, stop: int) -> Spans:
    """Return the version spans of the completion's tokens from `start` up to `stop` (exclusive). Tokens that `spans`
    does not cover are left out.
    """
    found: list[VersionSpan] = []
    begin = 0
    for span in spans:
        end = begin + span.num_tokens
        count = min(end, stop) - max(begin, start)
        if count > 0:
            found.append(VersionSpan(policy_version=span.policy_version, num_tokens=count))
        begin = end
    return tuple(found)


def problem(spans: Sequence[VersionSpan], completion_tokens: int) -> str:
    """Return the reason why these version spans cannot describe a completion of this length; "" if they can."""
    if num_tokens(spans) != completion_tokens:
        return f"versions that cover {num_tokens(spans)} tokens instead of {completion_tokens}"
    versions = [span.policy_version for span in spans]
    if any(later <= earlier for earlier, later in pairwise(versions)):
        return f"versions that are not ascending: {', '.join(map(str, versions[:16]))}"
    return ""
