from __future__ import annotations

import pytest
import torch

from benchmarks.backends import drawing
from echo_shared.sampling import torch_draws


def test_all_draws_equal_the_references() -> None:
    found = drawing.equal_draws(3_000, 3_000, seed=0)
    assert found["draws"] == found["equal"] == 3_000
    assert 0 < found["in_float64"] < 300


def test_wrong_tokens_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(logits_RV: torch.Tensor, u_R: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((len(u_R),), -5), u_R

    monkeypatch.setattr(torch_draws, "draw_float64", wrong)
    found = drawing.equal_draws(3_000, 3_000, seed=0)
    assert found["equal"] == found["draws"] - found["in_float64"]


def test_headline() -> None:
    equal = [{"part": "equal draws", "draws": 20, "equal": 19}, {"part": "equal draws", "draws": 5, "equal": 5}]
    times = [{"part": "draw time", "over_float64": ratio} for ratio in (0.5, 0.9)]
    assert drawing.headline([*equal, *times]) == {"draws": 25, "draws_equal": 24, "draw_time_over_float64": 0.9}
    assert set(drawing.headline([]).values()) == {None}
