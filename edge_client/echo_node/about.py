"""A node's description of itself: an Introduction for the hub, a snapshot for the user."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import MappingProxyType
from typing import Any, Self

from echo_node.condition import described
from echo_node.config import NodeConfig
from echo_node.core.history import lately
from echo_node.core.manners import Hold
from echo_node.core.tenant_choice import TenantChoice
from echo_node.core.troubles import Trouble
from echo_node.device_rows import device_rows
from echo_node.engine.choosing import EngineChoosers
from echo_node.host.hubs import Joining
from echo_node.net.client import Introduction
from echo_node.panel import NodeSnapshot
from echo_node.shell import RunShell, artefact_title
from echo_shared.signing.identity import Identity, fingerprint
from echo_shared.wire.messages import Fetched, Totals, Welcome


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcomed:
    """State of the node since a hub first admitted the node, by a Welcome message. This state survives reconnects."""

    hub_key: bytes
    welcome: Welcome
    """Newest Welcome message of the hub. The hub sends one at the start of every connection."""
    shell: RunShell
    counts_before: Mapping[str, int] = field(default_factory=dict)
    """Number of rollouts by state when the run was opened. The snapshot shows the growth since then as
    `since_start`.
    """
    totals: Totals | None = None
    """Newest totals of this node's work (rollouts, tokens and credit), which the hub counts for the node's key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class About:
    """Identity and settings of this node, from which the hub's Introduction and the user's snapshot are made."""

    me: Identity
    name: str
    joining: Joining
    chooser: EngineChoosers
    cost_per_hour: float = 0.0
    power_watts: float = 0.0
    owner: Identity | None = None
    """Key of the owner's machines; None = the node belongs to no fleet."""
    punches: bool = False
    """True: the node can link with other nodes by hole punching through routers."""
    willing: TenantChoice = field(default_factory=TenantChoice)
    """The tenants of the hub for which the node works."""
    started_at: float = field(default_factory=time.time)

    @classmethod
    def of(
        cls,
        config: NodeConfig,
        *,
        me: Identity,
        joining: Joining,
        chooser: EngineChoosers,
        owner: Identity | None = None,
    ) -> Self:
        return cls(me=me, name="", joining=joining, chooser=chooser, owner=owner).with_settings(config)

    def with_settings(self, config: NodeConfig) -> Self:
        return replace(
            self,
            name=config.name or f"node-{self.me.node_id[:8]}",
            cost_per_hour=config.cost_per_hour,
            power_watts=config.power_watts,
            punches=config.punching,
            willing=TenantChoice(answers=config.answers, refuses=config.refused_tenants),
        )

    def introduction(self, *, swarm_port: int, mesh_port: int) -> Introduction:
        return Introduction(
            name=self.name,
            invite_token=self.joining.invite_token,
            backend=self.chooser.choice.name,
            device=self.chooser.hardware.summary,
            swarm_port=swarm_port,
            mesh_port=mesh_port,
            cost_per_hour=self.cost_per_hour,
            power_watts=self.power_watts,
            owner=self.owner,
            punches=self.punches,
            answers=self.willing.answers,
            refuses=self.willing.refuses,
        )

    def _basics(self, holds: Iterable[Hold], *, connected: bool) -> dict[str, Any]:
        """Return the fields of the user's snapshot that do not depend on the hub's run. `holds`: reasons to pause."""
        return {
            "pid": os.getpid(),
            "node_id": self.me.node_id,
            "name": self.name,
            "backend": self.chooser.choice.name,
            "device": self.chooser.label,
            "hub": self.joining.address.origin,
            "connected": connected,
            "started_at": self.started_at,
            "cost_per_hour": self.cost_per_hour,
            "holds": {hold.reason.value: hold.sentence for hold in holds},
        }

    def snapshot(
        self,
        welcomed: Welcomed | None,
        holds: tuple[Hold, ...],
        troubles: Iterable[Trouble],
        *,
        connected: bool,
        now: float,
        token_rates: Sequence[float] = (),
        device_holds: Mapping[str, tuple[Hold, ...]] = MappingProxyType({}),
    ) -> NodeSnapshot:
        """Return the snapshot for the user. `now`: seconds of the node's monotonic clock (`running_s`); `token_rates`:
        tokens per second in each of the last periods of ten seconds (`TokenHistory.rates`); `device_holds`: holds of
        single devices.
        """
        about = self._basics(holds, connected=connected)
        gone = self.chooser.trouble
        met = (*troubles, *(() if gone is None else (gone,)))
        problems = {trouble.code.value: trouble.sentence for trouble in met}
        if welcomed is None:
            return described(NodeSnapshot(**about, activity="connecting", problems=problems), is_finishing=False)
        shell = welcomed.shell
        held = shell.engine_held
        status, progress = shell.work.status(now), shell.work.progress
        preparing = shell.preparing
        unpacked = shell.fetcher.unpacking
        fetching = {artefact_title(version): got for version, got in shell.fetching.items() if version not in unpacked}
        snapshot = NodeSnapshot(
            **about,
            activity=status.activity,
            hub_fingerprint=fingerprint(welcomed.hub_key),
            run_name=welcomed.welcome.run_name,
            policy_version=status.policy_version,
            published_version=shell.work.newest_published,
            capacity=status.capacity,
            held_rollouts=shell.work.held_rollouts,
            devices=device_rows(shell.work.devices(now), self.chooser, device_holds),
            tokens_per_s=status.tokens_per_s,
            drawn_tokens_per_s=lately(token_rates),
            rollouts=shell.writer.counts,
            fetching=fetching,
            preparing=preparing,
            left_s=shell.time_left.note({**fetching, **preparing}, now),
            stage=shell.engine_stage,
            cage={} if held is None else held.as_json(),
            lease_tokens=progress.tokens,
            lease_most_tokens=progress.most_tokens,
            works_for=progress.tenants,
            kept_keys=asdict(shell.kept_keys),
            drawn_rollouts=progress.finished_rollouts,
            drawn_tokens=progress.drawn_tokens,
            token_rates=tuple(token_rates),
            arrived_by="" if progress.newest_by is None else arrival(progress.newest_by),
            since_start=_since(welcomed.counts_before, shell.writer.counts),
            totals=None if welcomed.totals is None else _as_fields(welcomed.totals),
            page="" if welcomed.totals is None else f"{self.joining.address.origin}{welcomed.totals.page}",
            standby=shell.work.standby if connected else "",
            problems=problems,
        )
        return described(snapshot, is_finishing=progress.is_finishing)


def _since(before: Mapping[str, int], counts: Mapping[str, int]) -> dict[str, int]:
    """Return by how much the count of each final rollout state has grown since `before`."""
    final = ("trained", "evaluated", "answered", "dropped", "dropped:")
    return {
        key: count - before.get(key, 0)
        for key, count in counts.items()
        if key.startswith(final) and count > before.get(key, 0)
    }


def _as_fields(totals: Totals) -> dict[str, Any]:
    return {
        "trained": totals.trained_rollouts,
        "trained_tokens": totals.trained_tokens,
        "evaluated": totals.evaluated_rollouts,
        "answered": totals.answered_rollouts,
        "answered_tokens": totals.answered_tokens,
        "dropped": {one.reason: one.rollouts for one in totals.dropped},
        "others_checked": totals.others_checked,
        "share": totals.share,
        "rank": totals.rank,
        "num_ranked": totals.num_ranked,
    }


def arrival(fetched: Fetched) -> str:
    """Return a text about the arrival of an artefact: the transport of most bytes, the total size and the duration."""
    sent = fetched.pushed_bytes + fetched.mesh_bytes
    amounts = {
        "through the host's shared memory": fetched.shared_memory_bytes,
        "from a model hub": fetched.model_hub_bytes,
        "broadcast" if fetched.mesh_bytes else "inline": sent,
        "swarm": fetched.swarm_bytes,
        "web seed": fetched.web_seed_bytes,
    }
    total = sum(amounts.values())
    if not total:
        return "was already here"
    way = max(amounts, key=lambda name: amounts[name])
    others = f", {100 * fetched.mesh_bytes // total} % of it from other nodes" if way == "broadcast" else ""
    return f"{way}, {amount(total)} in {fetched.seconds:.1f} s{others}"


def amount(num_bytes: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes} bytes"
