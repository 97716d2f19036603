"""Notices about releases other than the running one."""

from __future__ import annotations

from typing import Final

import echo_shared
from echo_node.core.releases import is_newer
from echo_shared.errors import EchoError
from echo_shared.installation import how_to_upgrade

TAKES_OVER: Final = "takes_over"
"""Error code that ends a node so that its process becomes another release."""


def newer_release(hub_version: str) -> str:
    """Return a sentence if the hub runs a newer release, else ""."""
    if not is_newer(hub_version, echo_shared.__version__):
        return ""
    return f"The hub runs release {hub_version}, this node {echo_shared.__version__}. {how_to_upgrade()}"


def upgraded(release: str, *, takes_over: bool = False) -> EchoError:
    """Return the error that ends a refused node after another release was installed. A service then restarts with the
    new release; with `takes_over` the process becomes the new release.
    """
    return EchoError(
        f"Release {release} is installed now. This process runs {echo_shared.__version__}, which the hub refuses.",
        do="Restart the node: echo-node run. A service restarts by itself.",
        code=TAKES_OVER if takes_over else "upgraded",
    )
