"""Rewrite the commands with which volunteers join, so that they contain the hub address that the reader of the page
used."""

from __future__ import annotations

from dataclasses import replace

from echo_hub.dashboard.model import RunView


def addressed(run: RunView, address: str) -> RunView:
    """Return the view with its join commands rewritten to contain `address`; unchanged if `address` is empty."""
    if not address or not run.address or address == run.address:
        return run
    lines = {
        name: getattr(run, name).replace(run.address, address)
        for name in ("join_command", "install_command", "windows_install_command")
    }
    return replace(run, address=address, **lines)
