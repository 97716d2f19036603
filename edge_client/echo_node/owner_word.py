"""Commands of a running node's owner, from `echo-node` and from the page on loopback."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from echo_node.host.pause import pause_for
from echo_node.owner_watch import OwnerWatch
from echo_node.panel import NodeSnapshot, rows
from echo_node.status_page.page import StatusPage, Verb


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerWord:
    """Handlers of the owner's commands."""

    snapshot: Callable[[], NodeSnapshot]
    watch: OwnerWatch
    stop: Callable[[str], None]
    """Takes the address of the hub to forget; empty = forget none."""
    finish: Callable[[], None]
    reload: Callable[[], Mapping[str, Any]]
    """Load the settings again, and return the changes. Raises ConfigError."""

    def page(self) -> StatusPage:
        """Return the page for the browser, with all verbs except `page`."""
        return StatusPage(view=self._view, verbs=self._verbs())

    def verbs(self, page: StatusPage) -> dict[str, Verb]:
        """Return the verbs of the control socket by name."""
        return {**self._verbs(), "page": lambda _: {"url": page.invite()}}

    def _verbs(self) -> dict[str, Verb]:
        return {
            "status": lambda _: asdict(self.snapshot()),
            "stop": self._stop,
            "pause": self._pause,
            "resume": self._resume,
            "finish": self._finish,
            "reload": lambda _: self.reload(),
        }

    def _view(self) -> Mapping[str, Any]:
        snapshot = self.snapshot()
        return {"snapshot": asdict(snapshot), "rows": rows(snapshot)}

    def _pause(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        pause = pause_for(arguments.get("length"))
        self.watch.change(pause)
        return {"until": pause.until}

    def _resume(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        self.watch.change(None)
        return {}

    def _finish(self, _: Mapping[str, Any]) -> Mapping[str, Any]:
        self.finish()
        return {"pid": os.getpid(), "held_rollouts": self.snapshot().held_rollouts}

    def _stop(self, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        self.stop(str(arguments.get("leaves", "")))
        return {"pid": os.getpid()}
