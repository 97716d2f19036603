"""Links to other nodes, as a finding of `echo-node doctor`."""

from __future__ import annotations

import asyncio

from echo_node.config import NodeConfig
from echo_node.findings import Finding
from echo_node.host import control
from echo_node.host.paths import NodePaths
from echo_shared.errors import ConnectError

SUBJECT = "other nodes"


def examine_links(paths: NodePaths, config: NodeConfig) -> Finding:
    """Return the links of the running node; without one, the effect of the settings. Blocks the thread for a moment."""
    try:
        said = asyncio.run(control.ask(paths.control_file, "status")).get("links", "")
    except ConnectError:
        said = ""
    if said:
        return Finding(subject=SUBJECT, level="ok", what=str(said))
    if config.punching:
        what = "a running node links with them; if neither accepts connections, through both routers by the hub's help"
        return Finding(subject=SUBJECT, level="ok", what=what)
    what = "this node does not link through routers: nodes that accept no connections get nothing from it"
    return Finding(subject=SUBJECT, level="note", what=what, do="echo-node config set punching true")
