from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks.__main__ import names
from scripts.docs.benchmarks import ROOT, figures_of, write_pages

RESULTS = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")


def test_every_benchmark_has_a_page_with_its_figures(tmp_path: Path) -> None:
    write_pages(tmp_path, results=RESULTS)
    assert {path.stem for path in tmp_path.iterdir()} == {"index", *names()}
    index = (tmp_path / "index.md").read_text(encoding="utf-8")
    assert all(f"[{name}]({name}.md)" in index for name in names())
    page = (tmp_path / "manners.md").read_text(encoding="utf-8")
    assert "python -m benchmarks manners\n" in page and "A yield begins with" in page
    assert "| a paused node: share of a core, memory |" in page and "benchmarks dissemination`" not in page
    assert "Newest measurement" not in page


def test_a_section_of_the_results_ends_where_the_next_one_begins() -> None:
    told = [name for name in names() if figures_of(RESULTS, name)]
    assert {"backends", "demo", "dissemination", "learner", "learning", "manners", "simulate", "trust"} <= set(told)
    assert all(f"`python -m benchmarks {name}`" in figures_of(RESULTS, name) for name in told)
    assert all("\n## " not in figures_of(RESULTS, name) for name in told)


def test_every_section_of_the_results_is_of_a_benchmark() -> None:
    assert set(re.findall(r"(?m)^## (\w+): ", RESULTS)) <= set(names())
    assert len(re.findall(r"(?m)^## ", RESULTS)) == len(re.findall(r"(?m)^## \w+: ", RESULTS))


def test_the_newest_measurement_is_shown(tmp_path: Path) -> None:
    figures, pages = tmp_path / "figures", tmp_path / "pages"
    figures.mkdir()
    pages.mkdir()
    document = {"headline": {"accuracy": 0.9, "left_out": None}, "conditions": {"cores": 2}}
    (figures / "learning.json").write_text(json.dumps(document))
    write_pages(pages, results=RESULTS, figures=figures)
    page = (pages / "learning.md").read_text(encoding="utf-8")
    assert "| `accuracy` | `0.9` |" in page and "| `left_out` | `null` |" in page and "| `cores` | `2` |" in page
