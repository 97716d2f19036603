"""The last lines that a node prints: running time, tokens, the final state of its rollouts, and how to continue."""

from __future__ import annotations

from echo_node.panel import NodeSnapshot, credit, fates, rank
from echo_shared.wire.messages.fields import printable_line


def farewell(snapshot: NodeSnapshot, now: float, *, leaves: bool = False) -> list[str]:
    """Return the lines. `now`: seconds since the epoch; `leaves`: True if the node forgets the hub with all
    its files.
    """
    lines = [
        f"Ran for {length(now - snapshot.started_at)}: {snapshot.drawn_rollouts:,} rollouts, "
        f"{snapshot.drawn_tokens:,} tokens drawn.",
        f"Since the start: {fates(snapshot.since_start)}.",
    ]
    counts = snapshot.rollouts
    if under_way := counts.get("received", 0) + counts.get("scored", 0):
        hears = "" if leaves else " The node learns their fate when it runs again."
        lines.append(f"With the hub, waiting for training: {under_way:,}.{hears}")
    if waiting := counts.get("sent", 0):
        go = "" if leaves else " They are sent when the node runs again."
        lines.append(f"Finished, but not at the hub: {waiting:,}.{go}")
    if snapshot.totals is not None:
        lines.append(f"Over all time, by the hub's last count: {credit(snapshot.totals)}.")
        lines.append(f"Rank: {rank(snapshot.totals)}.")
    if snapshot.page:
        lines.append(f"Your page: {snapshot.page}")
    lines.append(f"Join again with: echo-node join {snapshot.hub}" if leaves else "Continue with: echo-node run")
    return [printable_line(line) for line in lines]


def length(seconds: float) -> str:
    """Format seconds as "2 h 14 min", "3 min" or "12 s"."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
