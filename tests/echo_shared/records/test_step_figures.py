from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

from echo_shared.records import step_figures
from echo_shared.records.step_figures import CHARTS, STEP_FIGURES, StepFigure, figures_of, lines_of

HUB = Path(__file__).resolve().parents[2] / "hub" / "echo_hub"


def test_every_figure_is_in_the_table_once() -> None:
    declared = [value for value in vars(step_figures).values() if isinstance(value, StepFigure)]
    assert sorted(STEP_FIGURES, key=str) == sorted(declared, key=str)
    for names in ([f.key for f in STEP_FIGURES], [f.prometheus for f in STEP_FIGURES if f.prometheus]):
        assert [name for name, times in Counter(names).items() if times > 1] == []


def test_every_line_has_a_chart_and_every_chart_a_line() -> None:
    assert {figure.chart for figure in STEP_FIGURES if figure.chart} == {chart.key for chart in CHARTS}
    for chart in CHARTS:
        lines = lines_of(chart)
        assert len({figure.unit for figure in lines}) == 1, "one axis has one unit"
        assert len({figure.colour for figure in lines}) == len({figure.label for figure in lines}) == len(lines)


EVIDENCE = {"core/trust/screening.py", "learner/screen.py", "operation/alert.py", "judges/llm.py"}
"""Files that use names of figures with another meaning."""


def test_figure_names_occur_only_in_the_table() -> None:
    """If other files named a figure, a change would be needed in two places. Exceptions: the store, whose columns have
    these names, and the verifier's evidence.
    """
    keys = "|".join(figure.key for figure in STEP_FIGURES)
    quoted = re.compile(rf"""["'](?:{keys})["']|\bfigures\.(?:{keys})\b""")
    found = [
        f"{path.relative_to(HUB)}:{number}: {line.strip()}"
        for path in sorted(HUB.rglob("*"))
        if path.suffix in (".py", ".js", ".html")
        and not path.is_relative_to(HUB / "store")
        and not path.is_relative_to(HUB / "verify")
        and path.relative_to(HUB).as_posix() not in EVIDENCE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if quoted.search(line)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("metrics", "seconds", "tokens_per_s"),
    [
        ({}, 9.0, None),
        ({"train_s": 2.0}, 2.0, None),
        ({"train_s": 2.0, "computed_tokens": 10.0}, 2.0, 5.0),
        ({"computed_tokens": 18.0}, 9.0, 2.0),
        ({"train_s": 0.0, "computed_tokens": 10.0}, 0.0, None),
    ],
)
def test_duration_and_token_rate_are_derived_from_metrics(
    metrics: dict[str, float], seconds: float, tokens_per_s: float | None
) -> None:
    found = figures_of(metrics, lasted_s=9.0)
    assert (found["seconds"], found["tokens_per_s"]) == (seconds, tokens_per_s)
    assert metrics.items() <= found.items()
    assert list(found) == [figure.key for figure in STEP_FIGURES], "missing figures are None"
