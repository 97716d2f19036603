from __future__ import annotations

from typing import Any


async def test_accuracy_before_is_the_base_models_and_after_the_newest(make_source: Any) -> None:
    fresh, late = await make_source(step=0).run_view(), await make_source(step=37).run_view()
    assert (fresh.accuracy_before, fresh.accuracy_after) == (None, None)
    assert late.accuracy_before == late.evaluations[0].greedy.accuracy
    assert late.accuracy_after == late.evaluations[-1].greedy.accuracy
    assert late.evaluations[-1].greedy.policy_version == 30
