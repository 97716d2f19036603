"""What a node says of releases other than the one that it runs."""

from __future__ import annotations

from typing import Final

import echo_shared
from echo_node.core.releases import is_newer
from echo_shared.errors import EchoError
from echo_shared.installation import how_to_upgrade

TAKES_OVER: Final = "takes_over"
"""The code of what ends a node so that the process becomes another release."""


def newer_release(hub_version: str) -> str:
    """A sentence, where the hub runs a newer release; else nothing."""
    if not is_newer(hub_version, echo_shared.__version__):
        return ""
    return f"The hub runs release {hub_version}, this node {echo_shared.__version__}. {how_to_upgrade()}"


def upgraded(release: str, *, takes_over: bool = False) -> EchoError:
    """What ends a node that the hub refuses, once another release lies on the disk: a service starts that, or, where
    its owner has turned that on, it `takes_over`."""
    return EchoError(
        f"Release {release} is installed now; this process runs {echo_shared.__version__}, which the hub refuses.",
        do="Start the node again: echo-node run. A service does so by itself.",
        code=TAKES_OVER if takes_over else "upgraded",
    )
