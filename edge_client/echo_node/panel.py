"""Views of a node: its snapshot, as log lines, and as text for `status` and the live view (`live_view`)."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import echo_shared
from echo_node.core.clocks import in_words
from echo_node.device_rows import device_line
from echo_shared.cage.description import Held
from echo_shared.wire.messages.fields import printable
from echo_shared.wire.owner_commands import LINE_CHARACTERS, NodeReport

log = logging.getLogger(__name__)

PLAIN_EVERY_S: Final = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSnapshot:
    """State of a node at one moment, as `echo-node status --json` prints it."""

    pid: int
    node_id: str
    name: str
    backend: str
    device: str
    hub: str
    connected: bool
    activity: str
    hub_fingerprint: str = ""
    run_name: str = ""
    policy_version: int | None = None
    """Newest version with which the node can sample."""
    published_version: int = 0
    """Newest version that the hub has published."""
    capacity: int = 0
    held_rollouts: int = 0
    tokens_per_s: float = 0.0
    """Speed of the engine under full load, from its measurement or from later work."""
    drawn_tokens_per_s: float | None = None
    """Tokens drawn per second over the last minute; None until ten seconds have passed."""
    rollouts: Mapping[str, int] = field(default_factory=dict)
    """Number of rollouts by state. Dropped ones also count as `dropped:REASON`, checked ones as `checked:passed` or
    `checked:failed`.
    """
    fetching: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(bytes received, total bytes) of each running fetch."""
    preparing: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """(bytes done, total bytes) of the work between a fetch and the engine's start, such as a conversion."""
    left_s: Mapping[str, float] = field(default_factory=dict)
    """Estimated seconds left of the entries of `fetching` and `preparing`."""
    stage: str = ""
    """Sentence about what the engine does before its first work; empty = nothing, or unknown."""
    cost_per_hour: float = 0.0
    """Price in US dollars per hour while the node is active; 0 = the work is donated."""
    standby: str = ""
    """Sentence with the reason why the hub gives no work; empty = no known reason."""
    update: str = ""
    """Notice of a newer release, with the way to get it; empty = none known."""
    holds: Mapping[str, str] = field(default_factory=dict)
    """Reasons for which the node pauses, as sentences by `HoldReason`; empty = it does not pause."""
    devices: Sequence[Mapping[str, Any]] = ()
    """The devices with their engines, from `device_rows.DeviceRow`; empty before the hub has admitted the node."""
    hub_gpu: float | None = None
    """Share of the GPU that this user's own hub uses, with its learner; it pauses nothing. None = unknown."""
    share: float = 1.0
    """Share of its device's time that the engine may use."""
    share_reason: str = ""
    """Sentence with the share and its reason; empty = the engine may use its whole device."""
    awake: str = ""
    """Text about how the machine is kept awake; empty = it may fall asleep."""
    cage: Mapping[str, Any] = field(default_factory=dict)
    """Protections of the running engine's cage, from `Held.as_json`; empty = no engine runs."""
    problems: Mapping[str, str] = field(default_factory=dict)
    """Problems that should pass by themselves, as sentences by `TroubleCode`."""
    state: str = "connecting"
    """State in one word, from `echo_node.condition`."""
    reason: str = ""
    """Reason of the state, in a sentence."""
    started_at: float = 0.0
    """Start of the node, in seconds since the epoch."""
    lease_tokens: int = 0
    """Tokens so far of the unfinished leased rollouts."""
    lease_most_tokens: int = 0
    """Maximum tokens of the unfinished leased rollouts, in total."""
    works_for: Sequence[str] = ()
    """Names of the tenants whose leases the node holds; empty = it works only for the run itself."""
    kept_keys: Mapping[str, int] = field(default_factory=dict)
    """Keys and values that the engines keep for later turns: `kept_bytes`, `hits` (prompts that began with a kept
    sequence) and `tokens` (their tokens that were not computed again). Empty before the hub has admitted the node.
    """
    drawn_rollouts: int = 0
    """Rollouts finished since the start. `drawn_tokens` counts the tokens of all rollouts."""
    drawn_tokens: int = 0
    token_rates: Sequence[float] = ()
    """Tokens per second in each of the last periods of ten seconds, oldest first."""
    arrived_by: str = ""
    """Transport by which `policy_version` came, in words."""
    since_start: Mapping[str, int] = field(default_factory=dict)
    """Rollouts trained on, evaluated, answered or dropped since the start. Dropped ones also count as
    `dropped:REASON`."""
    totals: Mapping[str, Any] | None = None
    """Totals of this node's key in the run, from the hub; None = not received.

    Numbers of rollouts: `trained`, `evaluated`, `answered`, `others_checked`, and `dropped` by reason. Also
    `trained_tokens`, `answered_tokens`, the `share` of all useful work, and the `rank` (None = unranked) among
    `num_ranked` nodes.
    """
    page: str = ""
    """Address of the node's own page on the hub."""
    router: str = ""
    """Text about the router and the ports for other nodes, to follow the words "The router"; empty = not known yet."""
    links: str = ""
    """Number and kind of this node's links to other nodes, to follow the words "This node is"; empty = there are no
    other nodes.
    """


def report_of(snapshot: NodeSnapshot, *, problem: str) -> NodeReport:
    """Return the report about this node that the owner's other machines show."""
    return NodeReport(
        problem=problem[:LINE_CHARACTERS],
        name=snapshot.name,
        state=snapshot.state,
        reason=snapshot.reason[:LINE_CHARACTERS],
        device=f"{snapshot.backend}, {snapshot.device}"[:LINE_CHARACTERS],
        tokens_per_s=snapshot.drawn_tokens_per_s,
        drawn_tokens=snapshot.drawn_tokens,
        version=echo_shared.__version__,
    )


class Panel(Protocol):
    """Receiver of snapshots, called a few times a second."""

    def update(self, snapshot: NodeSnapshot) -> None: ...


class PlainPanel:
    """A panel that logs a line when counts have changed or a fetch takes long, at most every
    `PLAIN_EVERY_S` seconds.
    """

    def __init__(self) -> None:
        self._shown: Mapping[str, int] = {}
        self._shown_at = float("-inf")
        self._fetched_shown_at = time.monotonic()

    def update(self, snapshot: NodeSnapshot) -> None:
        now = time.monotonic()
        if snapshot.rollouts != self._shown and now - self._shown_at >= PLAIN_EVERY_S:
            self._shown, self._shown_at = snapshot.rollouts, now
            log.info("%s", summary(snapshot))
        under_way = [*fetching(snapshot), *preparing(snapshot)]
        if not under_way:
            self._fetched_shown_at = now
        elif now - self._fetched_shown_at >= PLAIN_EVERY_S:
            self._fetched_shown_at = now
            log.info("%s: %s", "Fetching" if snapshot.fetching else "Preparing", "; ".join(under_way))


def summary(snapshot: NodeSnapshot) -> str:
    counts = snapshot.rollouts
    on_hub = sum(
        counts.get(state, 0) for state in ("received", "scored", "trained", "evaluated", "answered", "dropped")
    )
    sampled = on_hub + counts.get("sent", 0)
    version = "no version" if snapshot.policy_version is None else f"version {snapshot.policy_version}"
    return (
        f"{snapshot.activity}, {version}: {sampled} rollouts sampled, {on_hub} received by the hub, "
        f"{counts.get('trained', 0)} trained, {counts.get('evaluated', 0)} evaluated, "
        f"{_for_tenants(counts.get('answered', 0))}"
        f"{counts.get('dropped', 0)} dropped; {_speed(snapshot)}"
    )


def fetching(snapshot: NodeSnapshot) -> list[str]:
    return [_amount(snapshot, title, *amount) for title, amount in snapshot.fetching.items()]


def preparing(snapshot: NodeSnapshot) -> list[str]:
    return [_amount(snapshot, title, *amount) for title, amount in snapshot.preparing.items()]


def _amount(snapshot: NodeSnapshot, title: str, done: int, total: int) -> str:
    left_s = snapshot.left_s.get(title)
    left = "" if left_s is None else f", about {in_words(left_s)} left"
    return f"{title}: {done / 1e6:.1f} of {total / 1e6:.1f} MB ({100 * done // max(1, total)} %){left}"


def rows(snapshot: NodeSnapshot) -> list[tuple[str, str]]:
    """Return (name, value) of each row of `echo-node status` and the live view."""
    result = [
        ("state", f"{snapshot.state}. {snapshot.reason}".rstrip()),
        ("hub", f"{snapshot.run_name} at {snapshot.hub}" if snapshot.run_name else snapshot.hub),
        ("policy", _policy(snapshot)),
        ("lease", _lease(snapshot)),
        *([("works for", ", ".join(snapshot.works_for))] if snapshot.works_for else []),
        ("speed", _speed(snapshot)),
        ("receipts", _receipts(snapshot)),
        *([("kept keys", _kept(snapshot.kept_keys))] if any(snapshot.kept_keys.values()) else []),
    ]
    result += [("fetching", amount) for amount in fetching(snapshot)]
    result += [("preparing", amount) for amount in preparing(snapshot)]
    if snapshot.totals is not None:
        result += [("credit", credit(snapshot.totals)), ("rank", rank(snapshot.totals))]
    if snapshot.page:
        result.append(("page", snapshot.page))
    passed, failed = snapshot.rollouts.get("checked:passed", 0), snapshot.rollouts.get("checked:failed", 0)
    if passed or failed:
        result.append(("checked", f"{passed:,} found honest, {failed:,} not"))
    if snapshot.cost_per_hour:
        result.append(("asks for", f"${snapshot.cost_per_hour:.4g} an hour, while it is active"))
    result += [("device", device_line(one)) for one in snapshot.devices if one["is_chosen"]]
    if snapshot.router:
        result.append(("router", snapshot.router))
    if snapshot.links:
        result.append(("other nodes", snapshot.links))
    result.append(("node", f"{snapshot.name} ({snapshot.node_id}), {snapshot.backend} on {snapshot.device}"))
    if snapshot.hub_fingerprint:
        result.append(("hub's key", snapshot.hub_fingerprint))
    if snapshot.cage:
        result.append(("engine's cage", Held.of(snapshot.cage).sentence))
    if snapshot.share_reason:
        result.append(("share", snapshot.share_reason))
    if snapshot.awake:
        result.append(("awake", snapshot.awake))
    if snapshot.hub_gpu:
        result.append(("GPU", f"shared with your own hub, which uses {snapshot.hub_gpu:.0%} of it"))
    if snapshot.update:
        result.append(("update", snapshot.update))
    result += [("problem", sentence) for sentence in snapshot.problems.values()]
    return [(name, printable(value)) for name, value in result]


def _policy(snapshot: NodeSnapshot) -> str:
    if snapshot.policy_version is None:
        return f"none loaded; newest published: {snapshot.published_version}"
    came = f", {snapshot.arrived_by}" if snapshot.arrived_by else ""
    return f"version {snapshot.policy_version}{came}; newest published: {snapshot.published_version}"


def _speed(snapshot: NodeSnapshot) -> str:
    """Return the current speed. It is lower than the engine's if the hub has little work or the machine is busy."""
    can = f"its engine can do {snapshot.tokens_per_s:,.0f}" if snapshot.tokens_per_s else "its engine is not measured"
    if snapshot.drawn_tokens_per_s is None:
        return f"not known yet; {can} tokens/s" if snapshot.tokens_per_s else f"not known yet; {can}"
    return f"{snapshot.drawn_tokens_per_s:,.0f} tokens/s in the last minute; {can}"


def _lease(snapshot: NodeSnapshot) -> str:
    if not snapshot.held_rollouts:
        return "nothing at this moment"
    of_most = f"{snapshot.lease_tokens:,} of at most {snapshot.lease_most_tokens:,} tokens"
    return f"{snapshot.held_rollouts} rollouts, {of_most}"


def _kept(keys: Mapping[str, int]) -> str:
    return f"{keys['kept_bytes'] / 1e6:,.1f} MB; {keys['hits']:,} turns began with them ({keys['tokens']:,} tokens)"


def _receipts(snapshot: NodeSnapshot) -> str:
    """Return the number of rollouts by state since this computer joined."""
    counts = snapshot.rollouts
    waiting = f"{counts.get('sent', 0):,} wait for the hub, " if counts.get("sent") else ""
    under_way = counts.get("received", 0) + counts.get("scored", 0)
    return f"{waiting}{under_way:,} with the hub, {fates(counts)}"


def fates(counts: Mapping[str, int]) -> str:
    by_reason = {key.partition(":")[2]: count for key, count in counts.items() if key.startswith("dropped:")}
    return (
        f"{counts.get('trained', 0):,} trained, {counts.get('evaluated', 0):,} evaluated, "
        f"{_for_tenants(counts.get('answered', 0))}"
        f"{counts.get('dropped', 0):,} dropped{_reasons(by_reason)}"
    )


def _for_tenants(count: int, tokens: int = 0) -> str:
    """Return a part of a sentence with the number of rollouts that were delivered to tenants; empty if none were.
    `tokens` 0: unknown, because an older hub does not report it.
    """
    return f"{count:,} answered{f' ({tokens:,} tokens)' if tokens else ''}, " if count else ""


def credit(totals: Mapping[str, Any]) -> str:
    """Return the credit of the node's key, as the hub counts it."""
    dropped = sum(totals["dropped"].values())
    checked = f", {totals['others_checked']:,} of others checked" if totals["others_checked"] else ""
    return (
        f"{totals['trained']:,} trained ({totals['trained_tokens']:,} tokens), {totals['evaluated']:,} evaluated, "
        f"{_for_tenants(totals.get('answered', 0), totals.get('answered_tokens', 0))}"
        f"{dropped:,} dropped{_reasons(totals['dropped'])}{checked}: {totals['share']:.1%} of all useful work"
    )


def rank(totals: Mapping[str, Any]) -> str:
    """Return the node's rank among the nodes with useful work."""
    if totals["rank"] is None:
        return f"none yet: the first useful rollout brings one ({totals['num_ranked']:,} nodes have one)"
    return f"{totals['rank']:,} of {totals['num_ranked']:,}"


def _reasons(by_reason: Mapping[str, int]) -> str:
    found = sorted(by_reason.items(), key=lambda item: -item[1])
    return (
        f" ({', '.join(f'{count:,} {reason}' for reason, count in found if count)})" if any(by_reason.values()) else ""
    )


def from_json(fields: Mapping[str, Any]) -> NodeSnapshot:
    """Rebuild a snapshot that a daemon of the same version has sent."""
    return NodeSnapshot(**fields)
