from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.backends import scoring
from echo_shared.sampling import draws


@given(st.integers(2, 300), st.data(), st.integers(1, 64), st.integers(1, 2**20))
def test_every_row_that_is_wanted_is_computed_once(count: int, data: st.DataObject, most: int, vocabulary: int) -> None:
    first = data.draw(st.integers(1, count - 1))
    cut = list(scoring.pieces(count, first, vocab_size=vocabulary, most=most))
    assert [begin for begin, _, _ in cut] == [0, *(end for _, end, _ in cut[:-1])] and cut[-1][1] == count - 1
    assert all(0 < end - begin <= most and wanted in (0, end - begin) for begin, end, wanted in cut)
    rows = [row for _, end, wanted in cut for row in range(end - wanted, end)]
    assert rows == list(range(first - 1, count - 1))


def test_rows_are_taken_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "_CHUNK_VALUES", 20)
    rng = np.random.default_rng(1)
    logits, tokens = rng.normal(size=(7, 9)).astype(np.float32), rng.integers(0, 9, 7).astype(np.int32)
    for found, whole in zip(scoring.intervals(logits, tokens, 0.7), draws.interval(logits, tokens, 0.7), strict=True):
        np.testing.assert_array_equal(found, whole)
