"""Version spans (consecutive tokens drawn with one version) behave like a plain list with one version per token."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_shared.sampling.version_spans import Spans, between, grown, num_tokens, problem
from echo_shared.wire.messages import VersionSpan

VERSIONS = st.lists(st.integers(0, 4), max_size=12).map(sorted)


def spans(*pairs: tuple[int, int]) -> Spans:
    return tuple(VersionSpan(policy_version=version, num_tokens=count) for version, count in pairs)


def told(versions: Sequence[int]) -> Spans:
    found: Spans = ()
    for version in versions:
        found = grown(found, version, 1)
    return found


def each(found: Spans) -> list[int]:
    return [span.policy_version for span in found for _ in range(span.num_tokens)]


@given(VERSIONS, st.integers(0, 14), st.integers(0, 14))
def test_spans_give_each_tokens_version(versions: list[int], start: int, stop: int) -> None:
    found = told(versions)
    assert each(found) == versions and num_tokens(found) == len(versions)
    assert problem(found, len(versions)) == ""
    assert len(found) == len(set(versions)), "each version once"
    assert each(between(found, start, stop)) == versions[start:stop]


def test_no_tokens_add_no_span() -> None:
    assert grown((), 3, 0) == () and grown(spans((3, 2)), 5, 0) == spans((3, 2))


@pytest.mark.parametrize(
    ("wrong", "tokens", "what"),
    [
        (spans((3, 2)), 3, "versions that cover 2 tokens instead of 3"),
        (spans((3, 2), (4, 2)), 3, "versions that cover 4 tokens instead of 3"),
        ((), 1, "versions that cover 0 tokens instead of 1"),
        (spans((3, 1), (3, 1)), 2, "versions that are not ascending: 3, 3"),
        (spans((3, 1), (5, 1), (4, 1)), 3, "versions that are not ascending: 3, 5, 4"),
    ],
)
def test_impossible_spans_are_named(wrong: Spans, tokens: int, what: str) -> None:
    assert problem(wrong, tokens) == what
