"""What a node says when it ends: how long it ran, what it drew, what became of that, where to look, how to go on."""

from __future__ import annotations

from echo_node.panel import NodeSnapshot, credit, fates, rank
from echo_shared.messages.fields import printable_line


def farewell(snapshot: NodeSnapshot, now: float, *, leaves: bool = False) -> list[str]:
    """In lines. `now` is in seconds since the epoch; `leaves`: the hub is left, and all that came from it goes."""
    lines = [
        f"Ran for {length(now - snapshot.started_at)}: {snapshot.drawn_rollouts:,} rollouts, "
        f"{snapshot.drawn_tokens:,} tokens drawn.",
        f"Since the start: {fates(snapshot.since_start)}.",
    ]
    counts = snapshot.rollouts
    if under_way := counts.get("received", 0) + counts.get("scored", 0):
        hears = "" if leaves else " The node hears of them when it runs again."
        lines.append(f"With the hub, to be trained on or not: {under_way:,}.{hears}")
    if waiting := counts.get("sent", 0):
        go = "" if leaves else " They go there when the node runs again."
        lines.append(f"Finished, and not at the hub yet: {waiting:,}.{go}")
    if snapshot.totals is not None:
        lines.append(f"Over all time: {credit(snapshot.totals)}.")
        lines.append(f"Rank: {rank(snapshot.totals)}.")
    if snapshot.page:
        lines.append(f"Your place: {snapshot.page}")
    lines.append(f"Join again with: echo-node join {snapshot.hub}" if leaves else "Go on with: echo-node run")
    return [printable_line(line) for line in lines]


def length(seconds: float) -> str:
    """2 h 14 min; 3 min; 12 s."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min"
