"""`echo-hub rollouts`: what the model writes, from a run's store, beside a hub that serves it or without one."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from echo_hub.beside_hub import RunArgument, store_of, when
from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_shared.errors import ConfigError
from echo_shared.installation import how_to_install
from echo_shared.rollout_books import RolloutFilter, RolloutsPage, RolloutSummary, RolloutText

if TYPE_CHECKING:
    from echo_hub.rollouts import RolloutReader

_EXPORTED_AT_ONCE: Final = 1_000
"""Rollouts of one row group of a Parquet file."""


def rollouts(
    run_directory: RunArgument,
    step: Annotated[int | None, typer.Option(min=0, help="Of the groups of this step's batch.")] = None,
    group: Annotated[int | None, typer.Option(min=0, help="Of this group.")] = None,
    node: Annotated[str, typer.Option(metavar="ID", help="Leased to this node.")] = "",
    version: Annotated[int | None, typer.Option(min=0, help="Leased by this policy version.")] = None,
    state: Annotated[str, typer.Option(help="leased, received, scored, trained, evaluated or dropped.")] = "",
    drop: Annotated[str, typer.Option(metavar="REASON", help="Dropped for this reason.")] = "",
    check: Annotated[str, typer.Option(help="no, passed or failed: whether it was computed again.")] = "",
    reward_min: Annotated[float | None, typer.Option(help="A reward of at least this.")] = None,
    reward_max: Annotated[float | None, typer.Option(help="A reward of at most this.")] = None,
    tokens_min: Annotated[int | None, typer.Option(min=0, help="At least so many tokens.")] = None,
    tokens_max: Annotated[int | None, typer.Option(min=0, help="At most so many tokens.")] = None,
    text: Annotated[str, typer.Option(help="With this in the completion, in small or capital letters.")] = "",
    before: Annotated[str, typer.Option(metavar="ID", help="Leased before this rollout: goes on with a list.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=100_000, help="So many at most.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
    parquet: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write all that fit there, with prompts, tokens and logprobs.")
    ] = None,
) -> None:
    """Show what the model writes: the rollouts that fit, those that were leased last first."""
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
    with _reader(directory) as reader:
        if parquet is not None:
            typer.echo(f"Wrote {write_parquet(reader, wanted, parquet)} rollouts to {parquet}")
            return
        page = reader.page(wanted, before=place, limit=limit)
    if as_json:
        from echo_hub.dashboard.responses import jsonable

        typer.echo(json.dumps(jsonable(page), indent=2, allow_nan=False))
        return
    _print(page)


def _understood(asked: dict[str, Any], before: str) -> tuple[RolloutFilter, str]:
    """As the page understands the same query. Raises ConfigError."""
    from echo_hub.dashboard.rollouts_page import WrongQueryError, filter_of, place_of

    query = {name: str(value) for name, value in asked.items() if value not in (None, "")}
    try:
        return filter_of(query), place_of({"before": before})
    except WrongQueryError as error:
        raise ConfigError(
            "These rollouts cannot be looked for.", got=str(error), do="See: echo-hub rollouts --help"
        ) from error


@contextmanager
def _reader(directory: RunDirectory) -> Iterator[RolloutReader]:
    from echo_hub.rollouts import RolloutReader
    from echo_hub.run.base_model import PromptCodec, resolve_base
    from echo_hub.scoring.problems import Problems

    with store_of(directory) as store:
        config = load_config(directory.config, {})
        codec = PromptCodec.of_run(config, resolve_base(config.model.base))
        yield RolloutReader(config, store=store, codec=codec, problems=cache(lambda: Problems.of_run(config, codec)))


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
    Console(width=1_000).print(table)  # Whatever the terminal's width: ids are copied from it, and scripts read it.
    if page.before:
        typer.echo(f"There are more: --before {page.before}")


def components_text(components: Mapping[str, float] | None) -> str:
    """score 1, format 0.5"""
    return ", ".join(f"{name} {value:.3g}" for name, value in (components or {}).items())


def _why_not(one: RolloutSummary) -> str:
    """Why there is no text of it."""
    if one.num_tokens is None:
        return "(never came in)"
    return f"(not kept: {one.not_kept})" if one.not_kept else "(not kept)"


def write_parquet(reader: RolloutReader, wanted: RolloutFilter, path: Path) -> int:
    """Writes all rollouts that fit, one a row; how many. The file is there as a whole or not at all.

    Raises ConfigError where pyarrow is not installed, or the file cannot be written.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("Parquet files need pyarrow.", got=str(error), do=how_to_install("parquet")) from error
    schema, count = _schema(pyarrow), 0
    rows = (_row(*found) for found in reader.export(wanted))
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temporary:
            whole = Path(temporary) / "rollouts.parquet"
            with parquet.ParquetWriter(whole, schema, compression="zstd") as writer:
                while part := list(islice(rows, _EXPORTED_AT_ONCE)):
                    writer.write_table(pyarrow.Table.from_pylist(part, schema=schema))
                    count += len(part)
            whole.replace(path)
    except OSError as error:
        raise ConfigError("The file cannot be written.", got=str(error), do="Name another file.") from error
    return count


def _schema(pyarrow: Any) -> Any:
    text, number, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    span = pyarrow.struct([("node_id", text), ("policy_version", number), ("num_tokens", number)])
    return pyarrow.schema(
        [
            *((name, text) for name in ("rollout_id", "node_id", "node_name", "evaluation", "task")),
            *((name, number) for name in ("group_id", "index", "turn", "step", "policy_version", "num_tokens")),
            *((name, text) for name in ("state", "drop_reason", "detail", "checked", "not_kept")),
            ("reward", real),
            ("components", pyarrow.map_(text, real)),
            *((name, real) for name in ("leased_at", "received_at", "scored_at", "final_at", "sampling_s")),
            *((name, text) for name in ("prompt", "completion", "observation", "finish_reason")),
            ("completion_ids", pyarrow.list_(pyarrow.int32())),
            ("behavior_logprobs", pyarrow.list_(pyarrow.float32())),
            ("spans", pyarrow.list_(span)),
        ]
    )


def _row(summary: RolloutSummary, prompt: str, drawn: RolloutText | None) -> dict[str, Any]:
    """A row of `_schema`; what there is nothing of is null."""
    row = {name: getattr(summary, name) for name in RolloutSummary.__dataclass_fields__}
    row["components"] = None if summary.components is None else list(summary.components.items())
    if drawn is not None:
        row |= {
            "completion": drawn.text,
            "observation": drawn.observation,
            "finish_reason": drawn.finish_reason,
            "sampling_s": drawn.sampling_s,
            "completion_ids": drawn.completion_ids,
            "behavior_logprobs": drawn.behavior_logprobs,
            "spans": [
                {"node_id": span.node_id, "policy_version": span.policy_version, "num_tokens": span.num_tokens}
                for span in drawn.spans
            ],
        }
    return row | {"prompt": prompt}
