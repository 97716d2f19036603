"""`echo-hub compare`: compare curves and settings of several runs. Their hubs need not run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from echo_hub.config.file import load_config
from echo_hub.lifecycle.beside_hub import store_of
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError

if TYPE_CHECKING:
    from echo_hub.lifecycle.comparing import Curve

_WIDTH: Final = 32
_OTHER: Final = "–"


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN...", help="The runs' directories, two or more.")],
    figure: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Only this curve, by its key in --json; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every point of every curve as JSON.")] = False,
) -> None:
    """Compare runs: reward, held-out accuracy, idle share and more by step, and the settings that differ."""
    from echo_hub.dashboard.responses import jsonable
    from echo_hub.lifecycle.comparing import curves_of, differing

    if len(runs) < 2:
        raise ConfigError("There is nothing to compare.", got=f"{len(runs)} run", do="Name two runs or more.")
    directories = [RunDirectory(run) for run in runs]
    curves: list[dict[str, Curve]] = []
    for directory in directories:
        with store_of(directory) as store:
            curves.append(curves_of(store))
    configs = [load_config(directory.config, {}) for directory in directories]
    keys = _chosen(curves, figure)
    settings = differing(configs)
    if as_json:
        told = [
            {"run": str(run), "name": config.run.name, "curves": {key: of[key] for key in keys if key in of}}
            for run, config, of in zip(runs, configs, curves, strict=True)
        ]
        typer.echo(json.dumps(jsonable({"runs": told, "settings": settings}), indent=2, allow_nan=False))
        return
    names = [f"{run} ({config.run.name})" for run, config in zip(runs, configs, strict=True)]
    # Use a width that no terminal limits, because truncated names would be useless.
    console = Console(width=1_000, highlight=False)
    console.print(_settings(settings, names))
    console.print(_curves(curves, names, keys))


def _chosen(curves: list[dict[str, Curve]], asked: list[str] | None) -> list[str]:
    """Return the keys of the curves to show, in order. Raises ConfigError for a key that no run has."""
    known = {key: None for of in sorted(curves, key=len, reverse=True) for key in of}
    wrong = [key for key in asked or () if key not in known]
    if wrong:
        raise ConfigError(
            "None of these runs has this curve.", got=", ".join(wrong), do=f"Available: {', '.join(known) or 'none'}."
        )
    return [key for key in known if not asked or key in asked]


def _settings(settings: dict[str, tuple[Any, ...]], names: list[str]) -> Table | str:
    if not settings:
        return "All settings are the same.\n"
    table = Table("Setting", *map(escape, names), box=None)
    for name, values in settings.items():
        table.add_row(name, *(Text(json.dumps(value, ensure_ascii=False)) for value in values))
    return table


def _curves(curves: list[dict[str, Curve]], names: list[str], keys: list[str]) -> Table:
    from echo_hub.lifecycle.comparing import sparkline

    last_step = max((points[-1][0] for of in curves for curve in of.values() if (points := curve.points)), default=0)
    table = Table("\nCurve", f"\nSteps 0 to {last_step}", "\nLast", "\nBest", "\nAt step", "\nRun", box=None)
    width = min(_WIDTH, last_step + 1)
    for key in keys:
        known = [of[key] for of in curves if key in of]
        values = [value for curve in known for _, value in curve.points]
        low, high = min(values), max(values)
        label = known[0].label
        for name, of in zip(names, curves, strict=True):
            if (curve := of.get(key)) is None:
                table.add_row(label, "", _OTHER, _OTHER, _OTHER, Text(name))
            else:
                line = sparkline(curve, low=low, high=high, last_step=last_step, width=width)
                best = (_OTHER, _OTHER) if curve.best is None else (f"{curve.best:.4g}", str(curve.best_step))
                table.add_row(label, line, f"{curve.last:.4g}", *best, Text(name))
            label = ""
    return table
