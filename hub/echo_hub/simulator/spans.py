"""Spans of a completion: a span is a part that one node sampled with one version; spans are in token order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echo_shared.records.rollout import DrawnSpan

Spans = tuple[DrawnSpan, ...]


def grown(spans: Spans, more: DrawnSpan) -> Spans:
    """Append the part `more`, which may be empty, to `spans`. A part of the same node and version extends the last
    span.
    """
    if not more.num_tokens:
        return spans
    if spans and (spans[-1].node_id, spans[-1].policy_version) == (more.node_id, more.policy_version):
        return (*spans[:-1], replace(more, num_tokens=spans[-1].num_tokens + more.num_tokens))
    return (*spans, more)


def first(spans: Sequence[DrawnSpan], num_tokens: int) -> Spans:
    found: list[DrawnSpan] = []
    for span in spans:
        count = min(span.num_tokens, num_tokens)
        if count > 0:
            found.append(replace(span, num_tokens=count))
        num_tokens -= count
    return tuple(found)


def num_tokens(spans: Sequence[DrawnSpan]) -> int:
    return sum(span.num_tokens for span in spans)
