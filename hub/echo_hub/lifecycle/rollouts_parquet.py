"""Export rollouts to Parquet: all database fields, and prompt, advantage, texts and tokens."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, get_type_hints

import numpy as np

from echo_shared.errors import ConfigError
from echo_shared.installation import how_to_install
from echo_shared.records.rollout import DrawnSpan, RolloutPayload, RolloutSummary
from echo_shared.wire.messages import FinishReason
from echo_shared.wire.messages.fields import PackedArray

if TYPE_CHECKING:
    from echo_hub.lifecycle.rollouts import WholeRollout

_PAYLOAD: Final = {
    name: hint for name, hint in get_type_hints(RolloutPayload, include_extras=True).items() if name != "routes"
}
"""The payload's fields (tokens, log-probabilities, ...) that become columns. Routes are left out, because the database
deletes them after training."""
AT_ONCE: Final = 1_000
"""Number of rollouts in one row group of a Parquet file."""


def pyarrow_parquet() -> tuple[Any, Any]:
    """Return `pyarrow` and `pyarrow.parquet`. Raises ConfigError if they are not installed."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError("Parquet files need pyarrow.", got=str(error), do=how_to_install("parquet")) from error
    return pyarrow, parquet


def write_parquet(rollouts: Iterable[WholeRollout], path: Path) -> int:
    """Write one row for each rollout, and return the number of rows. The file appears when it is complete.

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
    """Yield Parquet tables of at most `AT_ONCE` rows."""
    columns, rows = schema(pyarrow), map(_row, rollouts)
    while part := list(islice(rows, AT_ONCE)):
        yield pyarrow.Table.from_pylist(part, schema=columns)


def schema(pyarrow: Any) -> Any:
    """Return the columns. Times are seconds since the epoch, log-probabilities are in nats, missing values are null."""
    text, number, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    return pyarrow.schema(
        [
            *((name, text) for name in ("rollout_id", "node_id", "node_name", "evaluation", "task")),
            *((name, number) for name in ("group_id", "index", "turn", "step", "policy_version", "num_tokens")),
            *((name, text) for name in ("state", "drop_reason", "detail", "checked", "not_kept")),
            ("reward", real),
            ("components", pyarrow.map_(text, real)),
            ("advantage", real),
            *((name, real) for name in ("leased_at", "received_at", "scored_at", "final_at")),
            *((name, text) for name in ("prompt", "completion", "observation")),
            *((name, _arrow_type(pyarrow, hint)) for name, hint in _PAYLOAD.items()),
        ]
    )


def _arrow_type(pyarrow: Any, hint: Any) -> Any:
    text, number, real = pyarrow.string(), pyarrow.int64(), pyarrow.float64()
    if (packed := PackedArray.of(hint)) is not None:
        return pyarrow.list_(pyarrow.from_numpy_dtype(np.dtype(packed.dtype)))
    if hint == tuple[DrawnSpan, ...]:
        return pyarrow.list_(pyarrow.struct([("node_id", text), ("policy_version", number), ("num_tokens", number)]))
    return {FinishReason: text, str: text, int: number, float: real}[getattr(hint, "__origin__", hint)]


def _row(whole: WholeRollout) -> dict[str, Any]:
    summary, drawn = whole.summary, whole.drawn
    row = {name: getattr(summary, name) for name in RolloutSummary.__dataclass_fields__}
    row["components"] = None if summary.components is None else list(summary.components.items())
    if drawn is not None:
        row |= {name: getattr(drawn.payload, name) for name in _PAYLOAD}
        row |= {
            "completion": drawn.text,
            "observation": drawn.observation,
            "spans": list(map(asdict, drawn.payload.spans)),
        }
    return row | {"prompt": whole.prompt, "advantage": whole.advantage}
