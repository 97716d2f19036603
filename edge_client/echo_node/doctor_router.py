"""The part of `echo-node doctor` that asks the home's router for an open port."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Final

from echo_node.config import NodeConfig
from echo_node.findings import Finding
from echo_shared.errors import SwarmError
from echo_shared.swarm import SwarmSettings, open_swarm

ROUTER_S: Final = 3.0
"""Seconds to wait for the router: libtorrent repeats its search after two seconds."""


def examine_router(config: NodeConfig) -> Finding:
    """Ask the router to open a port, as a running node does, and give the port back. Blocks for seconds if the router
    does not answer.
    """
    try:
        sentence, is_open = asyncio.run(_answer(config))
    except SwarmError as error:
        return Finding(subject="router", level="warning", what=error.brief, do=error.do or "")
    if is_open:
        return Finding(subject="router", level="ok", what=sentence)
    do = "A node works without. Switch on UPnP or NAT-PMP in the router, and other nodes can connect to this one."
    return Finding(subject="router", level="note", what=sentence, do=do)


async def _answer(config: NodeConfig) -> tuple[str, bool]:
    swarm = await open_swarm(SwarmSettings(listen_host=config.swarm_host, router_ports=config.router_ports))
    try:
        if swarm.router.is_asked:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ROUTER_S):
                    await swarm.router.changed.wait()
        return swarm.router.sentence, bool(swarm.router.opened)
    finally:
        await swarm.close()
