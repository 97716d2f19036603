"""The documentation's page of metrics; tests/echo_hub/dashboard/test_metrics.py compares it with a hub's metrics."""

from __future__ import annotations

from echo_shared.records.step_figures import STEP_FIGURES
from scripts.docs.metrics import families, page


def test_every_metric_is_listed_once_with_its_meaning() -> None:
    told = families()
    assert len({one.name for one in told}) == len(told) > 80
    assert all(one.about for one in told)
    assert {figure.prometheus for figure in STEP_FIGURES if figure.prometheus} <= {one.name for one in told}
    assert all(f"| `{one.name}` | {one.kind} |" in page() for one in told)
    ended = next(one for one in told if one.name == "echo_rollouts_total")
    assert (ended.kind, ended.labels) == ("counter", ("state", "reason"))
