"""`echo-hub bundle` writes a run so that strangers can check it; `echo-hub check-bundle` checks it on any machine."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from echo_hub.commands.progress_line import progress_line
from echo_hub.commands.try_task_command import option_of
from echo_hub.commands.until_stopped import run_until_stopped
from echo_hub.lifecycle.beside_hub import RunArgument, check_writable
from echo_hub.run.base_files import BUILTIN
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError
from echo_shared.signing.identity import fingerprint

if TYPE_CHECKING:
    from echo_hub.bundles.writing import WrittenBundle


def bundle(
    run_directory: RunArgument,
    destination: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory.")],
    step: Annotated[
        int | None,
        typer.Option(min=1, metavar="K", help="Also what is needed to repeat step K: the checkpoint before it."),
    ] = None,
    named: Annotated[
        list[str] | None,
        typer.Option(metavar="NODE", help="Give this node's name; only with its owner's consent. Repeatable."),
    ] = None,
) -> None:
    """Write the run to a directory that anybody can check with `check-bundle`, signed with the hub's key.

    It has seeds, leases, tokens, claimed log-probabilities, rewards, steps and adapters. Nodes have pseudonyms; names,
    addresses, paths and secret settings are left out. Works while a hub serves the run. But the seeds tell which
    problems come next, so publish a bundle only when its run has ended.
    """
    from echo_hub.bundles.writing import write_bundle

    written = write_bundle(RunDirectory(run_directory), destination, step=step, named=named or ())
    for line in _told(written, destination):
        typer.echo(line)


def _told(written: WrittenBundle, destination: Path) -> list[str]:
    from echo_hub.dashboard.formats import size

    lines = [
        f"Wrote {destination}: {written.rollouts} rollouts of {written.nodes} nodes, {written.steps} steps, "
        f"{len(written.versions)} versions, {size(written.size_bytes)}.",
        f"Signed with the hub's key {fingerprint(written.public_key)}",
    ]
    if written.without_tokens:
        lines.append(f"{written.without_tokens} rollouts are without tokens: keeping.share or max_bytes deleted them.")
    if written.missing_versions:
        first, last = written.missing_versions[0], written.missing_versions[-1]
        lines.append(
            f"The adapters of {len(written.missing_versions)} versions ({first} to {last}) are deleted, so their draws "
            "cannot be checked: learner.adapters_kept and adapters_max_bytes."
        )
    return [*lines, f"Anybody can check it: echo-hub check-bundle {destination}"]


def check_bundle(
    bundle_directory: Annotated[Path, typer.Argument(metavar="OUT", help="The bundle's directory.")],
    share: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Share of the rollouts, chosen at random, to recompute.")
    ] = 1.0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of that choice; default: a random one.")] = None,
    base: Annotated[
        str | None, typer.Option(metavar="DIR|ID", help="Your copy of the base model; a built-in one needs none.")
    ] = None,
    hub_key: Annotated[
        str, typer.Option(metavar="FINGERPRINT", help="The key that must have signed it, as the hub's pages show it.")
    ] = "",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1 or mps.")] = "auto",
    precision: Annotated[str, typer.Option(help="Of the computation: auto, float32 or bfloat16.")] = "auto",
    threads: Annotated[int | None, typer.Option(min=1, help="CPU threads; default: all.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="An option of the task, such as path=FILE for your copy; repeatable."),
    ] = None,
    run_task_code: Annotated[
        bool, typer.Option("--run-task-code", help="Run a task that is somebody's Python module, if it is installed.")
    ] = False,
    no_step: Annotated[bool, typer.Option("--no-step", help="Do not repeat the named step.")] = False,
    figures_json: Annotated[Path | None, typer.Option("--json", help="Write everything found there as well.")] = None,
) -> None:
    """Recompute a bundle: records, each node's draws, rewards, prompts and the step to repeat.

    Ends with status 1 if anything differs from what the bundle says.
    """
    from echo_hub.bundles.checking import CheckSettings
    from echo_hub.bundles.checking import check_bundle as check
    from echo_hub.bundles.report import as_json, lines_of
    from echo_hub.evaluation.work_count import WorkCount

    check_writable(figures_json)
    given = {} if seed is None else {"seed": seed}
    wanted = CheckSettings(
        base=base or _built_in(bundle_directory),
        share=share,
        hub_key=hub_key,
        device=device,
        precision=precision,
        threads=threads or os.cpu_count() or 1,
        options=dict(map(option_of, option or ())),
        runs_own_code=run_task_code,
        repeats_step=not no_step,
        **given,
    )
    count = WorkCount(doing="Checking", units="rollouts")
    with progress_line(count):
        found = run_until_stopped(check(bundle_directory, wanted, count), stopped="check again")
    if found is None:
        return
    for line in lines_of(found):
        typer.echo(line)
    if figures_json is not None:
        figures_json.write_text(json.dumps(as_json(found), indent=2) + "\n", encoding="utf-8")
    if found.discrepancies.total:
        raise typer.Exit(1)


def _built_in(directory: Path) -> str:
    """Return the name of the bundle's base model, if the model is built into Echo.

    Raises ConfigError for any other base model: a path or an id in a stranger's bundle is never used.
    """
    from echo_hub.bundles.reading import Bundle

    settings = Bundle.open(directory).run().settings
    model = settings.get("model")
    named = model.get("base") if isinstance(model, dict) else None
    if named in BUILTIN:
        return str(named)
    raise ConfigError(
        "The base model of the bundle's run is needed.",
        got=f"the run's base model is {str(named)[:200]!r}",
        do="Name your copy with --base: a directory, or an id on the model hub. Its files are compared by hash.",
    )
