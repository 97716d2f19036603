"""`echo-hub fork`: create a run from a version of another run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from echo_hub.lifecycle.beside_hub import RunArgument
from echo_hub.run.directory import RunDirectory
from echo_shared.signing import key_file
from echo_shared.signing.identity import fingerprint


def fork(
    run_directory: RunArgument,
    new_run: Annotated[Path, typer.Argument(metavar="NEWRUN", help="A new directory.")],
    at: Annotated[int | None, typer.Option(min=1, help="The version to fork; default: the newest.")] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="A setting that differs from RUN's; repeatable."),
    ] = None,
) -> None:
    """Create a run that continues from a version of RUN, with other settings. RUN itself stays unchanged."""
    from echo_hub.lifecycle.forking import fork as fork_run

    target = RunDirectory(new_run)
    made = fork_run(RunDirectory(run_directory), target, at=at, changes=changes or ())
    version = made.start.policy_version
    if made.start.has_optimizer:
        optimizer = "The optimizer resumes its state."
    else:
        there = ", ".join(map(str, made.checkpoints)) or "none"
        optimizer = f"The optimizer starts fresh: there is no checkpoint of step {version} (checkpoints: {there})."
    typer.echo(f"Created {target.config} with a new key, from {made.start.lineage[0]}. {optimizer}")
    typer.echo(f"Key fingerprint: {fingerprint(key_file.load(target.key).public_key)}")
    typer.echo(f"Its first step is {version + 1} of {made.config.training.steps}. Next: echo-hub serve {new_run}")
