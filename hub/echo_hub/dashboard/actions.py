"""The interface between the dashboard and the hub for operators' actions, and the action buttons of nodes.

The access guard has authenticated each request before it reaches a page, and names its actor (`actor_of`).
`echo_hub.actions.requests` defines the actions; pages and API only parse requests and show results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from echo_hub.actions.records import ActionRecord, Actor, ApiToken
from echo_hub.dashboard.model import NodeView


class ForbiddenError(Exception):
    """The token's scope does not permit this action."""


class NoSuchActionError(Exception):
    """No action has this number, or the action cannot be undone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionResult:
    """An action's outcome, as far as it is known when the hub answers the request."""

    record: ActionRecord
    secret: str = ""
    """A newly made token; "" for other actions. Only this answer shows the secret, because the hub stores only a
    hash."""


class OperatorDesk(Protocol):
    """The operator's actions as the pages call them. In the hub, `echo_hub.oversight.operator_desk` carries them
    out."""

    async def act(self, action: str, fields: Mapping[str, Any], by: Actor, *, strict: bool = False) -> ActionResult: ...

    async def undo(self, number: int, by: Actor) -> ActionResult: ...

    async def log(self, *, limit: int, before: int | None) -> Sequence[ActionRecord]: ...

    async def tokens(self) -> Sequence[ApiToken]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Button:
    """A button that starts an action, offered for nodes in certain states."""

    action: str
    label: str
    question: str
    """The consequence of the action. The page shows it before the operator confirms the action."""
    is_for: Callable[[NodeView], bool]
    in_table: bool = True
    """If True, tables of nodes also have the button. If False, only the node's own page has it."""


BUTTONS: Final = (
    Button(
        action="ban",
        label="Ban",
        question="The node is disconnected and may not join again. The run gets a new key.",
        is_for=lambda node: not node.banned,
    ),
    Button(action="unban", label="Unban", question="The node may take part again.", is_for=lambda node: node.banned),
    Button(
        action="pardon",
        label="Pardon",
        question="The node starts over: earlier checks no longer count, and all of its next rollouts are checked.",
        is_for=lambda node: node.totals.standing == "quarantined",
    ),
    Button(
        action="trust",
        label="Trust",
        question="The node counts as proven: few of its rollouts are checked, and training does not wait for checks.",
        is_for=lambda node: node.totals.standing in ("new", "suspect") and not node.banned,
        in_table=False,
    ),
    Button(
        action="distrust",
        label="Distrust",
        question="The node must prove itself again: each of its rollouts is checked before it is trained on.",
        is_for=lambda node: node.totals.standing == "proven" and not node.banned,
        in_table=False,
    ),
)


def buttons(node: NodeView) -> tuple[Button, ...]:
    return tuple(button for button in BUTTONS if button.is_for(node))
