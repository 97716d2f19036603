from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from echo_hub.dashboard import charts
from echo_hub.dashboard.charts import CURVES, tables
from echo_hub.dashboard.curves import Curves
from echo_hub.dashboard.operator_page import CHARTS

VIEWS = [*CHARTS.values(), *charts.learner()]
SHEET = (Path(charts.__file__).parent / "static" / "echo.css").read_text(encoding="utf-8")


async def test_every_line_has_its_numbers_and_its_colour(source: Any) -> None:
    curves = Curves()
    for step in await source.steps(0):
        curves.add(step)
    known = {
        CURVES: set(curves.after(0)[-1]),
        **{name: set(table) for name, table in tables(await source.run_view()).items()},
    }
    colours = set(re.findall(r"--([\w-]+):", SHEET))
    for view in VIEWS:
        for line in view.lines:
            assert {line.column, line.error} - {""} <= known[line.table], (view.key, line.column)
            assert line.colour in colours


def test_every_chart_has_a_title_a_unit_and_a_link() -> None:
    assert len({view.key for view in VIEWS}) == len(VIEWS)
    for view in VIEWS:
        assert all((view.title, view.about, view.x, view.y, view.figures_at))
        assert view.about.endswith(".")
        assert len({(line.colour, line.style) for line in view.lines}) == len(view.lines)
        assert [name for name in view.drawn if not isinstance(view.drawn[name], (str, bool, float, list))] == []


async def test_a_tables_columns_are_of_one_length(source: Any) -> None:
    for table in tables(await source.run_view()).values():
        assert len({len(column) for column in table.values()}) == 1
        assert table["x"] == sorted(table["x"])


async def test_the_page_holds_every_table_and_chart(hub: Any) -> None:
    async with hub.get("/") as response:
        text = await response.text()
    for view in VIEWS:
        assert f'id="chart-{view.key}"' in text
        for line in view.lines:
            assert line.table == CURVES or f'<script type="application/json" id="{line.table}" data-live>' in text
