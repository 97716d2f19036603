"""What an operator does from the pages and from scripts: what the hub supplies for it, and how the doors answer.

The guard has seen to it that the request is an operator's own, and says whose (`actor_of`). What actions there are is
said once, in `echo_hub.actions.requests`; here they are only read from what a door was given, and told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from echo_hub.actions.records import ActionRecord, Actor, ApiToken
from echo_hub.dashboard.model import NodeView


class ForbiddenError(Exception):
    """The token is not good for this."""


class NoSuchActionError(Exception):
    """There is no action of this number, or nothing takes it back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """What became of an action, as far as it is known."""

    record: ActionRecord
    secret: str = ""
    """The token that was made. It is nowhere else."""


class OperatorDesk(Protocol):
    """What the hub supplies: `echo_hub.oversight.operator_desk`."""

    async def act(self, action: str, fields: Mapping[str, Any], by: Actor, *, strict: bool = False) -> Answered: ...

    async def undo(self, number: int, by: Actor) -> Answered: ...

    async def log(self, *, limit: int, before: int | None) -> Sequence[ActionRecord]: ...

    async def tokens(self) -> Sequence[ApiToken]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Button:
    """An action that the page offers for some nodes."""

    action: str
    label: str
    question: str
    """Asked before it is done."""
    is_for: Callable[[NodeView], bool]
    in_table: bool = True
    """Offered beside other nodes too, and not on the node's own page alone."""


BUTTONS: Final = (
    Button(
        action="ban",
        label="Ban",
        question="It is disconnected and not let in again, and the run gets a new key.",
        is_for=lambda node: not node.banned,
    ),
    Button(action="unban", label="Unban", question="It may take part again.", is_for=lambda node: node.banned),
    Button(
        action="pardon",
        label="Pardon",
        question="It begins anew: what was found of it does not count any more, and its next rollouts are all checked.",
        is_for=lambda node: node.totals.standing == "quarantined",
    ),
    Button(
        action="trust",
        label="Trust",
        question="Its rollouts are trained on before they are checked, and few are: as if it had long proven itself.",
        is_for=lambda node: node.totals.standing in ("new", "suspect") and not node.banned,
        in_table=False,
    ),
    Button(
        action="distrust",
        label="Distrust",
        question="It has to prove itself anew: all that it sends is checked before anybody trains on it.",
        is_for=lambda node: node.totals.standing == "proven" and not node.banned,
        in_table=False,
    ),
)


def buttons(node: NodeView) -> tuple[Button, ...]:
    return tuple(button for button in BUTTONS if button.is_for(node))
