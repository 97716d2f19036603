"""Reference of rollout states and drop reasons, generated from the enumerations that the code uses."""

from __future__ import annotations

from enum import Enum

from echo_shared.described import attribute_docstrings
from echo_shared.wire.messages import Checked, DropReason, ReceiptState, StandbyReason
from scripts.docs.markdown import code, paragraphs, table, text


def page() -> str:
    """Return a page of states, drop reasons, check results and standby reasons."""
    return (
        "# States and drop reasons\n\n"
        "leased = trained + evaluated + dropped + in flight: every leased rollout ends in exactly one state, and a "
        "dropped one has exactly one reason. Node, hub and leaderboard report the same state. The hub counts states in "
        "`echo_rollouts_total`, and `echo-hub rollouts RUN --drop REASON` lists rollouts by drop reason.\n\n"
        + _section("States", ReceiptState)
        + _section("Drop reasons", DropReason)
        + _section("Checked", Checked)
        + _section("Why a node has no work", StandbyReason)
    )


def _section(title: str, kind: type[Enum]) -> str:
    said = attribute_docstrings(kind)
    rows = [(code(member.value), text(said.get(member.name))) for member in kind]
    return f"## {title}\n\n{paragraphs(kind.__doc__)}{table(('', 'meaning'), rows)}"
