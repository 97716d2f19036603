"""State of a model's accumulated gradient, without I/O. It tells whether the next optimizer step may use the gradient,
and from where the journal of requests must be replayed after a crash.

A pass (forward_backward) adds to the gradient; a step consumes it. If a pass fails, the gradient lacks a part, so the
next step fails too, and the gradient is dropped whole. The model is *clean* while its gradient is empty: a checkpoint
then holds everything. A checkpoint that is taken while the gradient is not empty covers the requests up to the last
clean point, because a pass does not change the weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final


class JournalKind(StrEnum):
    """Kinds of rows in the journal of a model's requests."""

    CREATE = "create"
    PASS = "pass"
    FORWARD = "forward"
    """A pass that does not add to the gradient."""
    STEP = "step"
    SAVE = "save"
    LOAD = "load"
    SPOILED = "spoiled"
    """A pass that failed, or that a client never sent, so the gradient lacks its part."""
    DROPPED = "dropped"
    """A step that failed, after which the gradient was dropped."""


class GradientState:
    """State of one model's gradient after the request `done_seq`."""

    def __init__(self, clean_seq: int) -> None:
        self.clean_seq = clean_seq
        """Newest request after which the gradient was empty."""
        self.is_spoiled = False
        """True if a pass has failed since `clean_seq`: the next step must fail."""
        self.is_empty = True
        """True if no pass has run and none has failed since `clean_seq`."""

    def note(self, kind: JournalKind, seq_id: int) -> None:
        """Update the state after a finished request of this kind."""
        match kind:
            case JournalKind.PASS:
                self.is_empty = False
            case JournalKind.SPOILED:
                self.is_empty, self.is_spoiled = False, True
            case JournalKind.STEP | JournalKind.DROPPED | JournalKind.LOAD | JournalKind.CREATE:
                self.clean_seq, self.is_empty, self.is_spoiled = seq_id, True, False
            case JournalKind.FORWARD | JournalKind.SAVE:
                if self.is_empty:
                    self.clean_seq = seq_id


AFTER_FAILURE: Final[Mapping[JournalKind, JournalKind]] = {
    JournalKind.PASS: JournalKind.SPOILED,
    JournalKind.STEP: JournalKind.DROPPED,
}
"""The kind that a journal row gets if its request fails. A failed request of any other kind changes nothing, so its row
is deleted."""


def replayed(marks: Sequence[tuple[int, JournalKind]]) -> list[tuple[int, JournalKind]]:
    """Return the passes and steps that must be computed again, in order. Passes whose gradient was dropped are left
    out. `marks` are the (seq_id, kind) of the journal's rows that are newer than the checkpoint, in order."""
    result: list[tuple[int, JournalKind]] = []
    passes: list[tuple[int, JournalKind]] = []
    is_spoiled = False
    for seq_id, kind in marks:
        match kind:
            case JournalKind.PASS:
                passes.append((seq_id, kind))
            case JournalKind.SPOILED:
                is_spoiled = True
            case JournalKind.STEP | JournalKind.DROPPED:
                if kind is JournalKind.STEP:
                    result += [*passes, (seq_id, kind)]
                passes, is_spoiled = [], False
            case _:
                pass
    return result if is_spoiled else result + passes
