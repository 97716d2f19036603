"""`echo-hub rollouts`: show a run's rollouts from its database. The hub need not run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echo_hub.config.file import load_config
from echo_hub.lifecycle.beside_hub import RunArgument, store_of, when
from echo_hub.lifecycle.rollouts_parquet import write_parquet
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError
from echo_shared.records.rollout import RolloutFilter, RolloutsPage, RolloutSummary

if TYPE_CHECKING:
    from echo_hub.lifecycle.rollouts import RolloutReader
    from echo_hub.store.store import Store


def rollouts(
    run_directory: RunArgument,
    step: Annotated[int | None, typer.Option(min=0, help="Only this step's batch.")] = None,
    group: Annotated[int | None, typer.Option(min=0, help="Only this group.")] = None,
    node: Annotated[str, typer.Option(metavar="ID", help="Only leased to this node.")] = "",
    version: Annotated[int | None, typer.Option(min=0, help="Only leased with this policy version.")] = None,
    state: Annotated[str, typer.Option(help="leased, received, scored, trained, evaluated or dropped.")] = "",
    drop: Annotated[str, typer.Option(metavar="REASON", help="Only dropped for this reason.")] = "",
    check: Annotated[str, typer.Option(help="Result of the honesty check: no, passed or failed.")] = "",
    reward_min: Annotated[float | None, typer.Option(help="Lowest reward.")] = None,
    reward_max: Annotated[float | None, typer.Option(help="Highest reward.")] = None,
    tokens_min: Annotated[int | None, typer.Option(min=0, help="Fewest tokens.")] = None,
    tokens_max: Annotated[int | None, typer.Option(min=0, help="Most tokens.")] = None,
    text: Annotated[str, typer.Option(help="Only completions that contain this text; case is ignored.")] = "",
    before: Annotated[str, typer.Option(metavar="ID", help="Only leased before this rollout; continues a list.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="Most rollouts to print.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    parquet: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write all matching rollouts to this file, with prompts, tokens and logprobs."
        ),
    ] = None,
) -> None:
    """Show what the model writes: the matching rollouts, the newest lease first."""
    asked = {
        "step": step,
        "group": group,
        "node": node,
        "version": version,
        "state": state,
        "drop": drop,
        "check": check,
        "reward_min": reward_min,
        "reward_max": reward_max,
        "tokens_min": tokens_min,
        "tokens_max": tokens_max,
        "text": text,
    }
    directory = RunDirectory(run_directory)
    wanted, place = _understood(asked, before)
    with store_of(directory) as store:
        reader = reader_of(directory, store)
        if parquet is not None:
            typer.echo(f"Wrote {write_parquet(reader.export(wanted), parquet)} rollouts to {parquet}")
            return
        page = reader.page(wanted, before=place, limit=limit)
    if as_json:
        from echo_hub.dashboard.responses import jsonable

        typer.echo(json.dumps(jsonable(page), indent=2, allow_nan=False))
        return
    _print(page)


def _understood(asked: dict[str, Any], before: str) -> tuple[RolloutFilter, str]:
    """Parse the filters in the same way as the query of the rollouts page. Raises ConfigError."""
    from echo_hub.dashboard.rollouts_page import WrongQueryError, filter_of, place_of

    query = {name: str(value) for name, value in asked.items() if value not in (None, "")}
    try:
        return filter_of(query), place_of({"before": before})
    except WrongQueryError as error:
        raise ConfigError(
            "The filter for rollouts is invalid.", got=str(error), do="See: echo-hub rollouts --help"
        ) from error


def reader_of(directory: RunDirectory, store: Store) -> RolloutReader:
    from echo_hub.lifecycle.rollouts import ProblemsOnDemand, RolloutReader
    from echo_hub.run.base_files import resolve_base
    from echo_hub.run.base_model import PromptCodec

    config = load_config(directory.config, {})
    codec = PromptCodec.of_run(config, resolve_base(config.model.base))
    problems = ProblemsOnDemand(config, codec, run_dir=directory.root)
    return RolloutReader(config, store=store, codec=codec, problems=problems)


def _print(page: RolloutsPage) -> None:
    from echo_hub.dashboard.formats import excerpt, fixed

    titles = ["Id", "Group", "Step", "Version", "Node", "State", "Checked", "Reward", "Tokens", "Leased", "Completion"]
    has_tasks = any(row.summary.task for row in page.rollouts)
    if has_tasks:
        titles.insert(2, "Task")
    has_components = any(row.summary.components for row in page.rollouts)
    table = Table(*titles, *(("Components",) if has_components else ()), box=None)
    for row in page.rollouts:
        one = row.summary
        table.add_row(
            one.rollout_id,
            str(one.group_id),
            *([one.task] if has_tasks else []),
            "" if one.step is None else str(one.step),
            str(one.policy_version),
            one.node_id,
            f"{one.state}: {one.drop_reason}" if one.drop_reason else one.state,
            one.checked,
            "" if one.reward is None else fixed(one.reward, 3),
            "" if one.num_tokens is None else str(one.num_tokens),
            when(one.leased_at),
            Text(_why_not(one) if row.text is None else excerpt(row.text)),
            *((components_text(one.components),) if has_components else ()),
        )
    Console(width=1_000).print(table)  # Wide regardless of the terminal: people copy ids from it, and scripts read it.
    if page.before:
        typer.echo(f"There are more: --before {page.before}")
    elif page.retired_step:
        typer.echo(
            f"{page.retired_rollouts} rollouts, of the steps up to {page.retired_step}, are no longer in the database: "
            "they were archived (echo-hub archive) or dropped (keeping.steps)."
        )


def components_text(components: Mapping[str, float] | None) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in (components or {}).items())


def _why_not(one: RolloutSummary) -> str:
    if one.num_tokens is None:
        return "(being sampled)" if one.is_in_flight else "(never received)"
    return f"(not kept: {one.not_kept})" if one.not_kept else "(not kept)"
