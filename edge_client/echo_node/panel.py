"""What a node shows of itself: a snapshot, redrawn on a terminal, as log lines elsewhere, as text for `status`."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from echo_node.host.cage.description import Held

log = logging.getLogger(__name__)

PLAIN_EVERY_S: Final = 15.0
LIVE_PER_S: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """A node at one moment; what `echo-node status --json` prints."""

    pid: int
    node_id: str
    name: str
    backend: str
    device: str
    hub: str
    connected: bool
    activity: str
    hub_fingerprint: str = ""
    run_name: str = ""
    policy_version: int | None = None
    """Newest version that the node can sample from."""
    published_version: int = 0
    """Newest version that the hub has published."""
    capacity: int = 0
    held_rollouts: int = 0
    tokens_per_s: float = 0.0
    rollouts: Mapping[str, int] = field(default_factory=dict)
    """Counts by state; those dropped also by reason, as `dropped:reason`; those that the hub has checked, as
    `checked:passed` and `checked:failed`."""
    fetching: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(bytes there, bytes in all) of what is being fetched."""
    cost_per_hour: float = 0.0
    """What the node asks of the hub's operator, in US dollars, while it is active; 0 = it is a gift."""
    standby: str = ""
    """Why the hub gives it no work, in a sentence; empty = nothing is known to keep it from that."""
    update: str = ""
    """That there is a newer release, and how to get it; empty = nothing is known of one."""
    holds: Mapping[str, str] = field(default_factory=dict)
    """Why the node leaves the machine to its owner, as sentences by `HoldReason`; empty = it does not."""
    cage: Mapping[str, Any] = field(default_factory=dict)
    """What the running engine is held to, as `Held.as_json` says; empty = no engine is up."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """What stands in its way and is to pass by itself, as sentences by `TroubleCode`."""


class Panel(Protocol):
    """Where snapshots go; called a few times a second."""

    def update(self, snapshot: NodeSnapshot) -> None: ...


class PlainPanel:
    """A log line now and then, when the counts have changed, or something large is being fetched."""

    def __init__(self) -> None:
        self._shown: Mapping[str, int] = {}
        self._shown_at = float("-inf")
        self._fetched_shown_at = time.monotonic()

    def update(self, snapshot: NodeSnapshot) -> None:
        now = time.monotonic()
        if snapshot.rollouts != self._shown and now - self._shown_at >= PLAIN_EVERY_S:
            self._shown, self._shown_at = snapshot.rollouts, now
            log.info("%s", summary(snapshot))
        if not snapshot.fetching:
            self._fetched_shown_at = now
        elif now - self._fetched_shown_at >= PLAIN_EVERY_S:
            self._fetched_shown_at = now
            log.info("Fetching: %s", "; ".join(fetching(snapshot)))


class LivePanel:
    """The newest snapshot as a table that redraws itself."""

    def __init__(self, live: Live) -> None:
        self._live = live

    def update(self, snapshot: NodeSnapshot) -> None:
        self._live.update(table(snapshot))


@contextmanager
def open_panel(console: Console, *, quiet: bool) -> Iterator[Panel]:
    """The panel that suits where the output goes."""
    if quiet or not console.is_terminal:
        yield PlainPanel()
        return
    with Live(console=console, refresh_per_second=LIVE_PER_S, transient=True) as live:
        yield LivePanel(live)


def summary(snapshot: NodeSnapshot) -> str:
    """The snapshot in one line."""
    counts = snapshot.rollouts
    on_hub = sum(counts.get(state, 0) for state in ("received", "scored", "trained", "evaluated", "dropped"))
    sampled = on_hub + counts.get("sent", 0)
    version = "no version" if snapshot.policy_version is None else f"version {snapshot.policy_version}"
    return (
        f"{snapshot.activity}, {version}: {sampled} rollouts sampled, {on_hub} received by the hub, "
        f"{counts.get('trained', 0)} trained, {counts.get('evaluated', 0)} evaluated, "
        f"{counts.get('dropped', 0)} dropped; {snapshot.tokens_per_s:.0f} tokens/s"
    )


def table(snapshot: NodeSnapshot) -> RenderableType:
    """The snapshot as rows of name and value."""
    grid = Table.grid(padding=(0, 2))
    amounts = iter(snapshot.fetching.values())
    for name, value in rows(snapshot):
        grid.add_row(Text(name, style="dim"), Text(value))  # Text: what a hub calls itself is not markup.
        if name == "fetching":
            done, total = next(amounts)
            grid.add_row("", ProgressBar(total=total, completed=done, width=40))
    return grid


def fetching(snapshot: NodeSnapshot) -> list[str]:
    """How far each fetch is."""
    return [
        f"{title}: {done / 1e6:.1f} of {total / 1e6:.1f} MB ({100 * done // max(1, total)} %)"
        for title, (done, total) in snapshot.fetching.items()
    ]


def rows(snapshot: NodeSnapshot) -> list[tuple[str, str]]:
    """What the table and `echo-node status` show."""
    counts = snapshot.rollouts
    reasons = [f"{count} {key.partition(':')[2]}" for key, count in counts.items() if key.startswith("dropped:")]
    dropped = f"{counts.get('dropped', 0)}" + (f" ({', '.join(reasons)})" if reasons else "")
    version = "-" if snapshot.policy_version is None else str(snapshot.policy_version)
    result = [
        ("node", f"{snapshot.name} ({snapshot.node_id})"),
        ("hub", f"{snapshot.hub} {snapshot.run_name}{'' if snapshot.connected else ' - not connected'}"),
        ("hub's key", snapshot.hub_fingerprint),
        ("engine", f"{snapshot.backend} on {snapshot.device}, {snapshot.tokens_per_s:.0f} tokens/s"),
        ("doing", snapshot.activity),
        ("policy", f"version {version}; newest published: {snapshot.published_version}"),
        (
            "rollouts",
            f"{snapshot.held_rollouts} leased, {counts.get('sent', 0)} waiting for the hub, "
            f"{counts.get('received', 0)} received, {counts.get('scored', 0)} scored, "
            f"{counts.get('trained', 0)} trained, {counts.get('evaluated', 0)} evaluated, {dropped} dropped",
        ),
    ]
    passed, failed = counts.get("checked:passed", 0), counts.get("checked:failed", 0)
    if passed or failed:
        result.append(("checked", f"{passed} found to be drawn honestly, {failed} not"))
    result += [("held back", sentence) for sentence in snapshot.holds.values()]
    if snapshot.cage:
        result.append(("engine's cage", Held.of(snapshot.cage).sentence))
    if snapshot.standby:
        result.append(("work", snapshot.standby))
    if snapshot.cost_per_hour:
        result.append(("asks for", f"${snapshot.cost_per_hour:.4g} an hour, while it is active"))
    result += [("fetching", amount) for amount in fetching(snapshot)]
    if snapshot.update:
        result.append(("update", snapshot.update))
    result += [("problem", sentence) for sentence in snapshot.problems.values()]
    return result


def from_json(fields: Mapping[str, Any]) -> NodeSnapshot:
    """The snapshot that a daemon of the same version sent."""
    return NodeSnapshot(**fields)
