from __future__ import annotations

from benchmarks.papers import small


def test_both_models_are_asked_the_same_sums() -> None:
    tiny, large = small.TINY_ON_SUMS.config(0), small.SMALL_UNTRAINED.config(0)
    assert (tiny.task, tiny.evaluation) == (large.task, large.evaluation)
    assert (tiny.model.base, large.model.base) == ("builtin:tiny", "builtin:small")
