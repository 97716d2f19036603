"""Reference of /metrics, generated from the source code, because a running hub exports only metrics that have
values.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from echo_hub.dashboard import metrics
from echo_shared.records.step_figures import STEP_FIGURES
from scripts.docs.markdown import code, table, text

_KINDS: Final = {
    "_gauge": "gauge",
    "_seconds": "gauge",
    "GaugeMetricFamily": "gauge",
    "CounterMetricFamily": "counter",
    "InfoMetricFamily": "info",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricFamily:
    """One metric of the hub. `name` is its name at /metrics, with the suffix `_total` or `_info`."""

    name: str
    kind: str
    about: str
    labels: tuple[str, ...] = ()


def families() -> list[MetricFamily]:
    """Return every metric that a hub may export, sorted by name."""
    figures = [figure for figure in STEP_FIGURES if figure.prometheus is not None]
    of_steps = [MetricFamily(name=figure.prometheus or "", kind="gauge", about=figure.about) for figure in figures]
    return sorted([*_in_source(), *of_steps], key=lambda family: family.name)


def page() -> str:
    rows = [(code(one.name), one.kind, ", ".join(map(code, one.labels)), text(one.about)) for one in families()]
    return (
        "# Metrics\n\n"
        "`/metrics` exports these metrics to Prometheus and other OpenMetrics readers. A metric without a current "
        "value has no sample.\n\n" + table(("metric", "type", "labels", "meaning"), rows)
    )


def _in_source() -> Iterator[MetricFamily]:
    for node in ast.walk(ast.parse(inspect.getsource(metrics))):
        match node:
            case ast.Call(
                func=ast.Name(id=function),
                args=[ast.Constant(value=str(name)), ast.Constant(value=str(about)), *_],
            ) if function in _KINDS:
                kind = _KINDS[function]
                suffix = {"counter": "_total", "info": "_info"}.get(kind, "")
                labels = ("share",) if function == "_seconds" else tuple(_labels(node))
                yield MetricFamily(name=name + suffix, kind=kind, about=about, labels=labels)


def _labels(call: ast.Call) -> Iterator[str]:
    for keyword in call.keywords:
        if keyword.arg == "labels":
            yield from ast.literal_eval(keyword.value)
