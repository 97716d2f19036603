"""Views of a node's devices: fields for programs, and a line for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from textwrap import shorten
from typing import Any, Final, Literal

from echo_node.core.engines import DeviceWork
from echo_node.core.manners import Hold
from echo_node.engine.choosing import EngineChoosers

PROBLEM: Final = 120
"""Maximum characters of a problem in a device's line; the row "problem" shows the whole sentence."""
DeviceCondition = Literal["starting", "paused", "resting", "refused", "sampling", "waiting"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceRow:
    """One device of a node, as `echo-node status --json` prints it in `devices`."""

    name: str
    """Name in the setting `devices`, or the kind of a device that the node has chosen itself."""
    is_chosen: bool
    """True if the setting `devices` names the device."""
    title: str
    """Product name of the device; empty = unknown."""
    backend: str
    """Kind of engine; empty = the device is not here."""
    state: DeviceCondition
    width: int
    """Maximum number of rollouts sampled at the same time; 0 = the engine is not up."""
    rollouts: int
    """Unfinished rollouts that the engine has."""
    tokens_per_s: float
    """Speed of the engine under full load; 0 = not measured."""
    precision: str
    holds: Mapping[str, str]
    """Reasons for which this device alone pauses, as sentences by `HoldReason`."""
    problem: str
    """Problem of the engine in a sentence; empty = none."""


def device_rows(
    works: Sequence[DeviceWork], chooser: EngineChoosers, holds: Mapping[str, tuple[Hold, ...]]
) -> tuple[dict[str, Any], ...]:
    """Return one row for each device of the node. `holds`: the holds (reasons to pause) of single devices."""
    return tuple(asdict(_row(work, chooser, holds.get(work.device, ()))) for work in works)


def _row(work: DeviceWork, choosers: EngineChoosers, holds: tuple[Hold, ...]) -> DeviceRow:
    chooser = choosers.by_device[work.device]
    choice = chooser.choice if chooser.has_decided else None
    device = None if choice is None else choice.on
    at_work: DeviceCondition = "sampling" if work.rollouts else "waiting"
    return DeviceRow(
        name=work.device or ("" if choice is None else choice.label),
        is_chosen=bool(work.device),
        title="" if device is None else device.title,
        backend="" if choice is None else choice.name,
        state=at_work if work.state == "working" else work.state,
        width=work.width,
        rollouts=work.rollouts,
        tokens_per_s=work.tokens_per_s,
        precision=work.precision,
        holds={hold.reason.value: hold.sentence for hold in holds},
        problem=work.problem,
    )


def device_line(row: Mapping[str, Any]) -> str:
    """Return a device in one line for people."""
    name = f"{row['name']} ({row['title']})" if row["title"] else row["name"]
    if row["holds"]:
        return f"{name}: paused. {' '.join(row['holds'].values())}"
    if row["problem"]:
        return f"{name}: {row['state']}. {shorten(row['problem'], PROBLEM, placeholder=' …')}"
    if row["state"] in ("paused", "starting", "resting"):
        return f"{name}: {row['state']}"
    rate = f", {row['tokens_per_s']:,.0f} tokens/s" if row["tokens_per_s"] else ""
    return f"{name}: {row['state']}, {row['rollouts']} rollouts, at most {row['width']} at once{rate}"
