"""What a node says of itself: to its hub as an introduction, to its user as a snapshot."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from echo_node.core.manners import Hold
from echo_node.core.troubles import Trouble
from echo_node.engine.choosing import EngineChooser
from echo_node.host.hubs import Joining
from echo_node.net.client import Introduction
from echo_node.panel import NodeSnapshot
from echo_node.shell import RunShell, artefact_title
from echo_shared.identity import Identity, fingerprint
from echo_shared.messages import Welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcomed:
    """What a node has once a hub has let it in, and keeps while it connects again."""

    hub_key: bytes
    welcome: Welcome
    """The newest."""
    shell: RunShell


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Who this node is; its engine is the chooser's, as it is when it is asked."""

    me: Identity
    name: str
    joining: Joining
    chooser: EngineChooser
    cost_per_hour: float = 0.0
    power_watts: float = 0.0

    def introduction(self, *, swarm_port: int, mesh_port: int) -> Introduction:
        """For the hub."""
        return Introduction(
            name=self.name,
            invite_token=self.joining.invite_token,
            backend=self.chooser.choice.name,
            device=self.chooser.hardware.summary,
            swarm_port=swarm_port,
            mesh_port=mesh_port,
            cost_per_hour=self.cost_per_hour,
            power_watts=self.power_watts,
        )

    def snapshot(
        self,
        welcomed: Welcomed | None,
        holds: tuple[Hold, ...],
        troubles: Iterable[Trouble],
        *,
        connected: bool,
        now: float,
    ) -> NodeSnapshot:
        """For the user. `now` is `running_s`."""
        about: dict[str, Any] = {
            "pid": os.getpid(),
            "node_id": self.me.node_id,
            "name": self.name,
            "backend": self.chooser.choice.name,
            "device": self.chooser.choice.device,
            "hub": self.joining.address.origin,
            "connected": connected,
            "holds": {hold.reason.value: hold.sentence for hold in holds},
        }
        gone = self.chooser.trouble
        met = (*troubles, *(() if gone is None else (gone,)))
        problems = {trouble.code.value: trouble.sentence for trouble in met}
        if welcomed is None:
            return NodeSnapshot(**about, activity="connecting", problems=problems)
        shell = welcomed.shell
        held = shell.engine_held
        status = shell.work.status(now)
        return NodeSnapshot(
            **about,
            activity=status.activity,
            hub_fingerprint=fingerprint(welcomed.hub_key),
            run_name=welcomed.welcome.run_name,
            policy_version=status.policy_version,
            published_version=shell.work.newest_published,
            capacity=status.capacity,
            held_rollouts=shell.work.held_rollouts,
            tokens_per_s=status.tokens_per_s,
            rollouts=shell.writer.counts,
            fetching={artefact_title(version): amount for version, amount in shell.fetching.items()},
            cost_per_hour=self.cost_per_hour,
            cage={} if held is None else held.as_json(),
            standby=shell.work.standby if connected else "",
            problems=problems,
        )
