"""Writes a page per benchmark: its own docstring, and its section of docs/results.md.

With a folder of results from `python -m benchmarks NAME --json FOLDER/NAME.json`, a page also shows that measurement's
headline and conditions.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.__main__ import names
from scripts.docs.markdown import code, paragraphs, table, text

ROOT = Path(__file__).resolve().parents[2]


def write_pages(folder: Path, *, results: str, figures: Path | None = None) -> None:
    """Write a page NAME.md for every benchmark, and index.md, to `folder`. `results` is the text of docs/results.md;
    `figures`, the folder of measured results.
    """
    about = {name: _description(name) for name in names()}
    rows = [(f"[{name}]({name}.md)", text(about[name])) for name in names()]
    intro = results.partition("\n## ")[0].partition("\n")[2].strip()
    (folder / "index.md").write_text(f"# Benchmarks\n\n{intro}\n\n{table(('', 'measures'), rows)}", encoding="utf-8")
    for name in names():
        page = f"# {name}\n\n{about[name]}\n\n```sh\npython -m benchmarks {name}\n```\n\n"
        page += f"## What it measures\n\n{paragraphs(ast.get_docstring(_module(name)))}"
        page += f"## Figures\n\n{figures_of(results, name) or 'No figures are published.'}\n\n"
        if figures is not None and (figures / f"{name}.json").is_file():
            page += _measured(figures / f"{name}.json")
        (folder / f"{name}.md").write_text(page, encoding="utf-8")


def figures_of(results: str, name: str) -> str:
    """Return the section of docs/results.md with the heading "NAME: question"; "" if there is none."""
    sections = re.split(r"(?m)^## ", results)
    body = next((section.partition("\n")[2] for section in sections if section.startswith(f"{name}: ")), "")
    return re.sub(r"\]\((?!https?:|#)", "](../", body.strip())  # The page is one folder deeper than docs/results.md.


def _module(name: str) -> ast.Module:
    """Return the parsed source of a benchmark. Importing the module would need the measured libraries, such as TRL."""
    package, module = ROOT / "benchmarks" / name / "__init__.py", ROOT / "benchmarks" / f"{name}.py"
    return ast.parse((package if package.is_file() else module).read_text(encoding="utf-8"))


def _description(name: str) -> str:
    for statement in _module(name).body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id="DESCRIPTION")], value=value)
                | ast.AnnAssign(target=ast.Name(id="DESCRIPTION"), value=ast.expr() as value)
            ):
                return str(ast.literal_eval(value))
    raise LookupError(f"benchmarks.{name} has no DESCRIPTION")


def _measured(file: Path) -> str:
    document: Mapping[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    rows = [
        [(code(key), code(json.dumps(value))) for key, value in document[of].items()]
        for of in ("headline", "conditions")
    ]
    page = "## Newest measurement\n\n" + table(("figure", "value"), rows[0])
    return page + "### Conditions\n\n" + table(("", ""), rows[1])
