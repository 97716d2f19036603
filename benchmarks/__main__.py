"""`python -m benchmarks NAME [--only CASE]... [--json FILE] [--seed N] [--scale S] [--hours H]`."""

from __future__ import annotations

import importlib
import inspect
import json
import logging
import pkgutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.table import Table

import benchmarks
from benchmarks.harness.progress import Measurement, NoSuchCase, Progress, as_text, conditions

NOT_BENCHMARKS = {"__main__", "fuzzing", "harness"}


def names() -> list[str]:
    return sorted({module.name for module in pkgutil.iter_modules(benchmarks.__path__)} - NOT_BENCHMARKS)


def main(
    name: Annotated[str, typer.Argument(help=f"One of: {', '.join(names())}.")],
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", help="Measure this case alone: its name, or 'long*'. Repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of all random numbers.")] = 0,
    scale: Annotated[
        float,
        typer.Option(min=1e-3, max=1.0, help="Factor on sizes and durations, for a trial. Only `pages` and `growth`."),
    ] = 1.0,
    hours: Annotated[
        float | None, typer.Option(min=0.01, max=1000, help="Hours of failures, all cases together. Only `chaos`.")
    ] = None,
) -> None:
    """Measure the cases of a benchmark, print a table, and write the figures."""
    if name not in names():
        raise typer.BadParameter(f"there is no benchmark {name!r}; there is: {', '.join(names())}")
    if json_file is not None and not json_file.parent.is_dir():
        raise typer.BadParameter(f"there is no directory {json_file.parent}", param_hint="--json")
    logging.basicConfig(format="%(message)s", handlers=[RichHandler(console=Console(stderr=True), show_path=False)])
    module = importlib.import_module(f"benchmarks.{name}")
    takes = inspect.signature(module.measure).parameters
    if scale != 1.0 and "scale" not in takes:
        raise typer.BadParameter(f"the benchmark {name} has a fixed size", param_hint="--scale")
    if hours is not None and "hours" not in takes:
        raise typer.BadParameter(f"the duration of the benchmark {name} cannot be set", param_hint="--hours")
    try:
        progress = Progress(module.plan(), only or (), say=_say)
    except NoSuchCase as error:
        raise typer.BadParameter(str(error), param_hint="--only") from error
    progress.begin()
    unfinished: BaseException | None = None
    try:
        sizes = {name: value for name, value in (("scale", scale), ("hours", hours)) if name in takes}
        measured: Measurement = module.measure(seed, progress, **sizes)
    except BaseException as error:  # noqa: BLE001 - It is raised below.
        # If a case fails, keep the results of earlier cases.
        measured, unfinished = progress.so_far or Measurement(headline={}, rows=progress.told), error
    console = Console()
    console.print(_table(name, measured.rows, measured.shown))
    console.print_json(data=measured.headline)
    if json_file is not None:
        document = {
            "benchmark": name,
            "description": module.DESCRIPTION,
            "unfinished": repr(unfinished) if unfinished else None,
            "headline": measured.headline,
            "only": only,
            "scale": scale,
            **progress.as_json(),
            "conditions": {**conditions(seed), **measured.conditions},
            "rows": measured.rows,
        }
        json_file.write_text(json.dumps(document, indent=2) + "\n")
    if unfinished is not None:
        raise unfinished


def _table(title: str, rows: list[dict[str, object]], shown: Sequence[str]) -> Table:
    columns = shown or list(dict.fromkeys(key for row in rows for key in row))
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(as_text(row.get(column)) for column in columns))
    return table


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    typer.run(main)
