"""Export rollouts to Parquet: all database fields, and prompt, advantage, texts and tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from echo_shared.errors import ConfigError
from echo_shared.installation import how_to_install
from echo_shared.rollout_books import RolloutSummary

if TYPE_CHECKING:
    from echo_hub.lifecycle.rollouts import WholeRollout

AT_ONCE: Final = 1_000
"""Rollouts in one row group."""


def pyarrow_parquet() -> tuple[Any, Any]:
    """Return `pyarrow` and `pyarrow.parquet`. Raises ConfigError if they are not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("Parquet files need pyarrow.", got=str(error), do=how_to_install("parquet")) from error
    return pyarrow, parquet


def write_parquet(rollouts: Iterable[WholeRollout], path: Path) -> int:
    """Write one row per rollout and return the number of rows. The file appears complete or not at all.

    Raises ConfigError if pyarrow is not installed or the file cannot be written.
    """
    pyarrow, parquet = pyarrow_parquet()
    count = 0
    try:
        with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}-") as temporary:
            whole = Path(temporary) / "rollouts.parquet"
            with parquet.ParquetWriter(whole, schema(pyarrow), compression="zstd") as writer:
                for table in tables(pyarrow, rollouts):
                    writer.write_table(table)
                    count += table.num_rows
            whole.replace(path)
    except OSError as error:
        raise ConfigError("The file cannot be written.", got=str(error), do="Name another file.") from error
    return count


def tables(pyarrow: Any, rollouts: Iterable[WholeRollout]) -> Iterator[Any]:
    """Yield tables of `AT_ONCE` rows each."""
    columns, rows = schema(pyarrow), map(_row, rollouts)
    while part := list(islice(rows, AT_ONCE)):
        yield pyarrow.Table.from_pylist(part, schema=columns)


def schema(pyarrow: Any) -> Any:
    """Return the columns. Times are seconds since the epoch, log-probabilities are in nats, missing values are null."""
    text, number, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    span = pyarrow.struct([("node_id", text), ("policy_version", number), ("num_tokens", number)])
    return pyarrow.schema(
        [
            *((name, text) for name in ("rollout_id", "node_id", "node_name", "evaluation", "task")),
            *((name, number) for name in ("group_id", "index", "turn", "step", "policy_version", "num_tokens")),
            *((name, text) for name in ("state", "drop_reason", "detail", "checked", "not_kept")),
            ("reward", real),
            ("components", pyarrow.map_(text, real)),
            ("advantage", real),
            *((name, real) for name in ("leased_at", "received_at", "scored_at", "final_at", "sampling_s")),
            *((name, text) for name in ("prompt", "completion", "observation", "finish_reason")),
            ("completion_ids", pyarrow.list_(pyarrow.int32())),
            ("behavior_logprobs", pyarrow.list_(pyarrow.float32())),
            ("spans", pyarrow.list_(span)),
        ]
    )


def _row(whole: WholeRollout) -> dict[str, Any]:
    summary, drawn = whole.summary, whole.drawn
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
    return row | {"prompt": whole.prompt, "advantage": whole.advantage}
