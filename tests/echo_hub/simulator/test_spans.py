"""Neighbouring spans (parts of a completion) of the same node and version are joined; they are cut if fewer tokens are
wanted.
"""

from __future__ import annotations

from echo_hub.simulator.spans import first, grown, num_tokens
from echo_shared.records.rollout import DrawnSpan


def span(node_id: str, policy_version: int, count: int) -> DrawnSpan:
    return DrawnSpan(node_id=node_id, policy_version=policy_version, num_tokens=count)


def test_continuing_spans_are_joined() -> None:
    assert grown((span("a", 1, 3),), span("a", 1, 2)) == (span("a", 1, 5),)
    assert grown((span("a", 1, 3),), span("a", 2, 2)) == (span("a", 1, 3), span("a", 2, 2))
    assert grown((span("a", 1, 3),), span("b", 1, 2)) == (span("a", 1, 3), span("b", 1, 2))
    assert grown((), span("a", 1, 0)) == ()


def test_the_first_tokens_are_those_of_the_first_spans() -> None:
    spans = (span("a", 1, 3), span("b", 2, 2))
    assert [first(spans, count) for count in (0, 2, 3, 4, 9)] == [
        (),
        (span("a", 1, 2),),
        spans[:1],
        (span("a", 1, 3), span("b", 2, 1)),
        spans,
    ]
    assert num_tokens(spans) == 5
