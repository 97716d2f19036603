"""Commands of a running node's owner, from `echo-node` and from the page on loopback."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from echo_node.core.manners import OwnerPause
from echo_node.host.pause import pause_for
from echo_node.node import JoinedNode
from echo_node.owner_watch import OwnerWatch
from echo_node.panel import rows
from echo_node.status_page.page import StatusPage, Verb


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerWord:
    node: JoinedNode
    watch: OwnerWatch

    def page(self) -> StatusPage:
        """Return the page for the browser, which can use all verbs except `page`."""
        return StatusPage(view=self._view, verbs=self._verbs())

    def verbs(self, page: StatusPage) -> dict[str, Verb]:
        """Return the verbs (commands) of the control socket by name."""
        return {**self._verbs(), "page": lambda _: {"url": page.invite()}}

    def _verbs(self) -> dict[str, Verb]:
        return {
            "status": lambda _: asdict(self.node.snapshot()),
            "stop": self._stop,
            "pause": self._pause,
            "resume": self._resume,
            "finish": self._finish,
            "reload": lambda _: self.node.reload(),
            "owner": self._owner,
        }

    def _view(self) -> Mapping[str, Any]:
        snapshot = self.node.snapshot()
        return {"snapshot": asdict(snapshot), "rows": rows(snapshot)}

    def _pause(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        pause = pause_for(arguments.get("length"))
        self._change(arguments.get("device"), pause)
        return {"until": pause.until}

    def _resume(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self._change(arguments.get("device"), None)
        return {}

    def _owner(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        self.node.reload_owner()
        return {}

    def _change(self, device: Any, pause: OwnerPause | None) -> None:
        """Pause or resume the device of this name, or the whole node if `device` is None. Raises ConfigError."""
        if device is None:
            self.watch.change(pause)
        else:
            self.watch.change_device(str(device), pause)

    def _finish(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        self.node.finish_for_good()
        return {"pid": os.getpid(), "held_rollouts": self.node.snapshot().held_rollouts}

    def _stop(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self.node.stop_once(leaves=str(arguments.get("leaves", "")))
        return {"pid": os.getpid()}
