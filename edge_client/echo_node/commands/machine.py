"""Commands that show the machine's parts and measure its speed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from echo_node.commands.options import DataDir, Json, settings
from echo_node.host import control
from echo_node.host.hubs import Hubs
from echo_node.host.paths import NodePaths
from echo_node.host.signals import run_until_stopped


def doctor(
    url: Annotated[str | None, typer.Argument(help="The hub to join; default: the last joined hub.")] = None,
    data_dir: DataDir = None,
    as_json: Json = False,
    cage: Annotated[
        bool, typer.Option("--cage", help="Show only the refusals of the engine's cage to a GPU's driver.")
    ] = False,
) -> None:
    """Show this machine's parts, the obstacles to joining, and how to remove them."""
    from echo_node.doctor import cage_lines, examine, lines_of

    if cage:
        for line in cage_lines():
            typer.echo(line)
        return
    diagnosis = examine(NodePaths.find(data_dir), url)
    if as_json:
        typer.echo(json.dumps(diagnosis.as_json(), indent=2))
    else:
        typer.echo("\n".join(lines_of(diagnosis)))
        typer.echo("This node can join." if diagnosis.can_join else "This node cannot join: see the problems above.")
    if not diagnosis.can_join:
        raise typer.Exit(1)


def bench(
    backend: Annotated[str, typer.Option("--backend", help="Measure this engine only.")] = "auto",
    model: Annotated[Path | None, typer.Option("--model", help="A model to measure on, instead of the hub's.")] = None,
    seconds: Annotated[float, typer.Option("--seconds", min=1, max=600, help="For each engine and device.")] = 15,
    as_json: Json = False,
    data_dir: DataDir = None,
) -> None:
    """Measure this machine's sampling speed with each engine, and choose the engine by it from now on."""
    from echo_node.bench import Bench, BenchReport, base_for, table_of, verdict
    from echo_node.host import hardware

    paths = NodePaths.find(data_dir)
    hub = Hubs(paths).last()
    config = settings(paths, {} if hub is None else hub.flags)
    console, progress = Console(), Console(stderr=True)
    if asyncio.run(control.is_running(paths.control_file)):
        progress.print("A node is running here: the measured speeds are too low.")

    async def measure() -> BenchReport:
        with base_for(paths, hub, model) as base:
            return await Bench(paths, config, hardware.detect(), base).run(
                backend=backend,
                seconds=seconds,
                begin=lambda choice: progress.print(
                    f"Measuring {choice.name} on {choice.label} on {base.title} ...", markup=False
                ),
            )

    report = run_until_stopped(measure())
    if as_json:
        typer.echo(json.dumps(report.as_json(), indent=2))
    else:
        console.print(table_of(report))
        console.print(verdict(report), markup=False)
    if report.chosen is None:
        raise typer.Exit(1)
