"""The measured throughput of transformers' `model.generate`, the ceiling of the torch engine, excludes padding after a
completion's end.
"""

from __future__ import annotations

import json

import pytest
import torch

from benchmarks.backends.speed import Generate
from benchmarks.harness.engine import sums
from echo_hub.run.base_files import resolve_base


def test_tokens_after_an_end_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    base = resolve_base("builtin:tiny")
    model = Generate(base, "f32")
    (group,) = sums(1, seed=0, group_size=4)
    stop_id = json.loads((base / "config.json").read_text())["eos_token_id"]
    assert group.stop_ids == (stop_id,)
    completions = torch.tensor([[5, stop_id, 0, 0], [5, 6, 7, stop_id], [5, 6, 7, 8], [stop_id, 0, 0, 0]])

    def answer(*, input_ids: torch.Tensor, **_: object) -> torch.Tensor:
        return torch.cat([input_ids, completions], dim=1)

    monkeypatch.setattr(model._model, "generate", answer)
    assert model.generate([group] * 4) == 2 + 4 + 4 + 1
