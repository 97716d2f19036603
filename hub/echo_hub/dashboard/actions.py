"""What an operator does to a node from the page: a POST to /actions/NAME with the node's id.

The guard has seen to it that the request is the operator's own. The hub says which actions there are (`Actions`); the
page shows a button for each that `buttons` names.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Final

from aiohttp import web

from echo_hub.dashboard.model import Changes, NodeView
from echo_hub.dashboard.responses import json_response, see_other
from echo_hub.dashboard.snapshots import Snapshots

log = logging.getLogger(__name__)

Actions = Mapping[str, Callable[[str], Awaitable[None]]]
"""By name, each takes a node's id and returns once it is done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Button:
    """An action that the page offers for some nodes."""

    action: str
    label: str
    question: str
    """Asked before it is done."""
    is_for: Callable[[NodeView], bool]


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
)


def buttons(node: NodeView) -> tuple[Button, ...]:
    return tuple(button for button in BUTTONS if button.is_for(node))


class ActionsRoom:
    def __init__(self, actions: Actions, snapshots: Snapshots, changes: Changes) -> None:
        self._actions = actions
        self._snapshots = snapshots
        self._changes = changes

    async def serve(self, request: web.Request) -> web.Response:
        """POST /actions/{action}"""
        action = self._actions.get(request.match_info["action"])
        node_id = (await request.post()).get("node", "")
        known = {node.totals.node_id for node in (await self._snapshots.get()).nodes}
        if action is None or not isinstance(node_id, str) or node_id not in known:
            return json_response({"error": "There is no such action, or no such node."}, status=404)
        await action(node_id)
        self._changes.notify()
        log.info("node %s: %s, by the operator on the page", node_id, request.match_info["action"])
        return see_other("/#nodes") if "text/html" in request.headers.get("Accept", "") else json_response({})
