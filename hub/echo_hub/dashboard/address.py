"""The lines with which a volunteer joins, under the address at which whoever reads them reached the hub."""

from __future__ import annotations

from dataclasses import replace

from echo_hub.dashboard.model import RunView


def addressed(run: RunView, address: str) -> RunView:
    """The run's view with its lines for `address`; as it is where that is empty."""
    if not address or not run.address or address == run.address:
        return run
    lines = {
        name: getattr(run, name).replace(run.address, address)
        for name in ("join_command", "install_command", "windows_install_command")
    }
    return replace(run, address=address, **lines)
