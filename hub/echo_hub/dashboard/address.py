"""Rewrite the commands that volunteers use to join, so that they contain the hub address of the reader's own
request."""

from __future__ import annotations

from dataclasses import replace

from echo_hub.dashboard.model import RunView


def addressed(run: RunView, address: str) -> RunView:
    """Return the view with its commands rewritten for `address`; unchanged if `address` is empty."""
    if not address or not run.address or address == run.address:
        return run
    lines = {
        name: getattr(run, name).replace(run.address, address)
        for name in ("join_command", "install_command", "windows_install_command")
    }
    return replace(run, address=address, **lines)
