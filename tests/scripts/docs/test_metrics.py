"""That these are the metrics which a hub shows is tested with the hub's: tests/echo_hub/dashboard/test_metrics.py."""

from __future__ import annotations

from echo_shared.step_figures import STEP_FIGURES
from scripts.docs.metrics import families, page


def test_every_metric_is_told_once_with_what_it_means() -> None:
    told = families()
    assert len({one.name for one in told}) == len(told) > 80
    assert all(one.about for one in told)
    assert {figure.prometheus for figure in STEP_FIGURES if figure.prometheus} <= {one.name for one in told}
    assert all(f"| `{one.name}` | {one.kind} |" in page() for one in told)
    ended = next(one for one in told if one.name == "echo_rollouts_total")
    assert (ended.kind, ended.labels) == ("counter", ("state", "reason"))
