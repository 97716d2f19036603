from __future__ import annotations

from benchmarks.papers import small


def test_problems_and_their_working_fit_the_model() -> None:
    for case in (small.TRAINED_KNIGHTS, small.SOKOBAN):
        config = case.config(0)
        assert config.model.base == "builtin:small" and config.sampling.max_tokens <= 160
