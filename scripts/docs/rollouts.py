"""What may become of a rollout, out of the enumerations that books, receipts and metrics use."""

from __future__ import annotations

from enum import Enum

from echo_shared.messages import Checked, DropReason, ReceiptState, StandbyReason
from scripts.docs.markdown import attribute_docstrings, code, paragraphs, table, text


def page() -> str:
    """States, drop reasons, checks, and why a node has no work."""
    return (
        "# States and drop reasons\n\n"
        "leased = trained + evaluated + dropped + in flight: every leased rollout ends in exactly one state, and a "
        "dropped one has exactly one reason. Node, hub and leaderboard say the same of it. The hub counts them in "
        "`echo_rollouts_total`, and `echo-hub rollouts RUN --drop REASON` lists them.\n\n"
        + _section("States", ReceiptState)
        + _section("Drop reasons", DropReason)
        + _section("Checked", Checked)
        + _section("Why a node has no work", StandbyReason)
    )


def _section(title: str, kind: type[Enum]) -> str:
    said = attribute_docstrings(kind)
    rows = [(code(member.value), text(said.get(member.name))) for member in kind]
    return f"## {title}\n\n{paragraphs(kind.__doc__)}{table(('', 'meaning'), rows)}"
