"""The Prometheus endpoint, /metrics.

Each scrape fills a new registry from one snapshot, on a thread; this module keeps no counters. Figures about nodes are
sums over all nodes. Series for single nodes exist only if the settings request them.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Final

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from echo_hub.dashboard.model import (
    CapacityView,
    CostView,
    CurriculumView,
    EvaluationView,
    FleetView,
    Readiness,
    RunState,
    RunView,
)
from echo_hub.dashboard.session_figures import SessionFigures
from echo_hub.dashboard.snapshots import Snapshot, Snapshots
from echo_shared.records import step_figures
from echo_shared.records.health import HubState
from echo_shared.records.node import TrustStatus
from echo_shared.records.run import StepRecord, VersionRecord

_VERSION: Final = re.compile(r"\d{1,9}(\.\d{1,9}){0,2}", re.ASCII)
"""A valid version of the exposition format. The Prometheus library fails on other versions, or would repeat an invalid
version in its answer.
"""


class Metrics:
    def __init__(self, snapshots: Snapshots, *, node_series: bool = False) -> None:
        """If `node_series`, add metrics for each single node that the pages know."""
        self._snapshots = snapshots
        self._node_series = node_series

    async def serve(self, request: web.Request) -> web.Response:
        """GET /metrics"""
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_OfSnapshot(await self._snapshots.get(), node_series=self._node_series))
        encode, content_type = choose_encoder(_understood(request.headers.get("Accept", "")))
        headers = {"Content-Type": content_type, "Cache-Control": "no-store"}
        response = web.Response(body=await asyncio.to_thread(encode, registry), headers=headers)
        response.enable_compression()
        return response


def _understood(accept: str) -> str:
    """Return the request's Accept header without formats whose version is invalid."""
    formats = []
    for wanted in accept.split(","):
        parameters = (part.strip().partition("=") for part in wanted.split(";")[1:])
        if all(_VERSION.fullmatch(value) for name, _, value in parameters if name == "version"):
            formats.append(wanted)
    return ",".join(formats)


class _OfSnapshot:
    def __init__(self, snapshot: Snapshot, *, node_series: bool) -> None:
        self._snapshot = snapshot
        self._node_series = node_series

    def collect(self) -> Iterator[Metric]:
        yield from _run(self._snapshot.run)
        for step in filter(None, [self._snapshot.run.newest_step]):
            yield from _learner(step)
            yield from _tasks(step)
        for evaluation in self._snapshot.run.evaluations[-1:]:
            yield from _evaluation(evaluation)
        yield from _sets(self._snapshot.run)
        yield from _rollouts(self._snapshot.run)
        yield _turned_away(self._snapshot.run)
        yield from _judges(self._snapshot.run)
        for sessions in filter(None, [self._snapshot.run.sessions]):
            yield from _sessions(sessions)
        yield from _dissemination(self._snapshot.run)
        for capacity in filter(None, [self._snapshot.run.capacity]):
            yield from _capacity(capacity)
        for curriculum in filter(None, [self._snapshot.run.curriculum]):
            yield from _curriculum(curriculum)
        for cost in filter(None, [self._snapshot.run.cost]):
            yield from _cost(cost)
        yield from _trust(self._snapshot.run.trust)
        yield from _fleet(self._snapshot.nodes)
        if self._node_series:
            yield from _nodes(self._snapshot.nodes)
        took_s = self._snapshot.took_s
        yield _gauge("echo_pages_snapshot_seconds", "Time that the pages' newest snapshot of the run took.", took_s)


def _gauge(name: str, help_text: str, value: float | None) -> Metric:
    family = GaugeMetricFamily(name, help_text)
    if value is not None:
        family.add_metric([], value)
    return family


def _labelled(family: Metric, samples: Iterable[tuple[list[str], float]]) -> Metric:
    assert isinstance(family, (CounterMetricFamily, GaugeMetricFamily))
    for labels, value in samples:
        family.add_metric(labels, value)
    return family


def _run(run: RunView) -> Iterator[Metric]:
    about = {"run_id": run.run_id, "name": run.name, "mode": run.mode, "task": run.task, "base_model": run.base_model}
    yield InfoMetricFamily("echo_run", "The run that this hub serves.", about)
    states = GaugeMetricFamily("echo_run_state", "1 for the current state of the run.", labels=["state"])
    yield _labelled(states, (([state], float(state is run.state)) for state in RunState))
    words = GaugeMetricFamily("echo_hub_state", "1 for the current state of the hub, as in /healthz.", labels=["state"])
    yield _labelled(words, (([state], float(state is run.health.state)) for state in HubState))
    yield _gauge("echo_healthy", "0 while something is broken; /readyz says what.", float(not run.broken))
    yield _gauge("echo_alarms", "Problems from which the hub recovers by itself; see /readyz.", len(run.alarms))
    problems = GaugeMetricFamily("echo_problem", "1 for each kind of current problem.", labels=["kind"])
    yield _labelled(problems, (([kind], 1.0) for kind in run.problem_kinds))
    ready = float(run.readiness is Readiness.READY)
    yield _gauge("echo_ready", "1 once the hub can train; 0 while it starts or something is broken.", ready)
    yield _gauge("echo_run_start_time_seconds", "When the run began, seconds since the epoch.", run.started_at)
    yield _gauge("echo_learner_step", "Newest trained step.", run.trained_step)
    yield _gauge("echo_learner_steps_target", "Steps of the whole run.", run.steps_total)
    yield _gauge("echo_policy_version", "Newest published version.", run.published_version)
    yield _gauge("echo_mean_reward", "Mean reward of the newest step's batch.", run.mean_reward)
    yield _gauge("echo_staleness_mean", "Mean staleness of the newest step's batch, in steps.", run.staleness_mean)
    yield _gauge("echo_staleness_max", "Largest staleness of the newest step's batch, in steps.", run.staleness_max)
    yield _gauge("echo_staleness_bound", "Largest staleness that is trained on, in steps.", run.max_staleness)


def _learner(step: StepRecord) -> Iterator[Metric]:
    family = GaugeMetricFamily(
        "echo_reward_component", "Mean of each component of the newest step's rewards.", labels=["component"]
    )
    yield _labelled(family, (([name], value) for name, value in step.components.items()))
    for figure in step_figures.STEP_FIGURES:
        if figure.prometheus is not None:
            yield _gauge(figure.prometheus, figure.about, step.figures.get(figure.key))


def _tasks(step: StepRecord) -> Iterator[Metric]:
    groups = GaugeMetricFamily("echo_task_groups", "Groups of a task in the newest step's batch.", labels=["task"])
    reward = GaugeMetricFamily("echo_task_mean_reward", "Mean reward of a task in that batch.", labels=["task"])
    solved = GaugeMetricFamily("echo_task_share_solved", "Share of a task's right completions.", labels=["task"])
    flat = GaugeMetricFamily("echo_task_flat_groups", "Groups of a task dropped for equal rewards.", labels=["task"])
    for key, figures in step.by_task.items():
        groups.add_metric([key], figures.num_groups)
        flat.add_metric([key], figures.num_flat)
        if figures.mean_reward is not None and figures.share_solved is not None:
            reward.add_metric([key], figures.mean_reward)
            solved.add_metric([key], figures.share_solved)
    yield from (groups, reward, solved, flat)


def _sets(run: RunView) -> Iterator[Metric]:
    greedy = GaugeMetricFamily("echo_heldout_set_accuracy", "Greedy accuracy on a set, 0..1.", labels=["set"])
    error = GaugeMetricFamily("echo_heldout_set_accuracy_error", "Standard error of that accuracy.", labels=["set"])
    mean = GaugeMetricFamily("echo_heldout_set_mean_at_k", "Share of k samples that succeed.", labels=["set", "k"])
    for one in run.evaluation_sets:
        if one.newest is not None:
            greedy.add_metric([one.name], one.newest.greedy.accuracy)
            error.add_metric([one.name], one.newest.greedy.accuracy_error)
            if one.newest.mean_at_k is not None:
                mean.add_metric([one.name, str(one.newest.samples)], one.newest.mean_at_k)
    yield from (greedy, error, mean)


def _evaluation(newest: EvaluationView) -> Iterator[Metric]:
    greedy = newest.greedy
    yield _gauge("echo_heldout_policy_version", "The newest evaluated version.", greedy.policy_version)
    yield _gauge("echo_heldout_problems", "Number of problems of the newest evaluation.", greedy.num_problems)
    yield _gauge("echo_heldout_accuracy", "Greedy accuracy of the newest evaluated version, 0..1.", greedy.accuracy)
    yield _gauge("echo_heldout_accuracy_error", "Standard error of that accuracy.", greedy.accuracy_error)
    yield _gauge("echo_heldout_mean_reward", "Mean reward of the greedy completions.", greedy.mean_reward)
    yield _gauge("echo_heldout_share_truncated", "Share of greedy completions cut off, 0..1.", greedy.share_truncated)
    yield _gauge("echo_heldout_eval_seconds", "Sampling time of the newest evaluation.", newest.seconds)
    mean = GaugeMetricFamily("echo_heldout_mean_at_k", "Share of k samples that solve a problem.", labels=["k"])
    error = GaugeMetricFamily("echo_heldout_mean_at_k_error", "Standard error of mean@k.", labels=["k"])
    passed = GaugeMetricFamily("echo_heldout_pass_at_k", "Problems that one of k samples solves.", labels=["k"])
    if newest.mean_at_k is not None and newest.mean_at_k_error is not None:
        mean.add_metric([str(newest.samples)], newest.mean_at_k)
        error.add_metric([str(newest.samples)], newest.mean_at_k_error)
    yield mean
    yield error
    yield _labelled(passed, (([str(k)], share) for k, share in newest.pass_at.items()))


def _rollouts(run: RunView) -> Iterator[Metric]:
    accounting = run.accounting
    leased = CounterMetricFamily(
        "echo_rollouts_leased", "Leased = trained + evaluated + answered + dropped + in flight."
    )
    yield _labelled(leased, [([], accounting.leased)])
    ended = CounterMetricFamily("echo_rollouts", "Rollouts in a final state.", labels=["state", "reason"])
    ended.add_metric(["trained", ""], accounting.trained)
    ended.add_metric(["evaluated", ""], accounting.evaluated)
    ended.add_metric(["answered", ""], accounting.answered)
    yield _labelled(ended, ((["dropped", reason], number) for reason, number in accounting.dropped.items()))
    yield _gauge("echo_rollouts_in_flight", "Rollouts leased and not yet in a final state.", accounting.in_flight)
    yield _gauge("echo_rollouts_per_second", "Rollouts received per second.", run.rollouts_per_s)
    gone_on = CounterMetricFamily("echo_rollouts_gone_on", "Received rollouts resumed from another node or a restart.")
    yield _labelled(gone_on, [([], run.rollouts_gone_on)])
    saved = CounterMetricFamily("echo_tokens_saved", "Tokens of resumed rollouts that were not sampled again.")
    yield _labelled(saved, [([], run.tokens_saved)])
    yield _gauge("echo_buffered_groups", "Complete groups that wait for the learner.", run.buffered_groups)


def _turned_away(run: RunView) -> Metric:
    family = CounterMetricFamily(
        "echo_turned_away", "Connections closed, nodes refused, invalid frames.", labels=["what", "reason"]
    )
    reasons = ((what, reason, number) for what, counts in run.turned_away.items() for reason, number in counts.items())
    return _labelled(family, (([what, reason], number) for what, reason, number in reasons))


def _judges(run: RunView) -> Iterator[Metric]:
    asked = CounterMetricFamily("echo_judge_calls", "Requests to a judge of rewards.", labels=["judge"])
    failed = CounterMetricFamily("echo_judge_failures", "Judge requests without a verdict.", labels=["judge", "why"])
    tokens = CounterMetricFamily("echo_judge_tokens", "Tokens computed, as a judge reports.", labels=["judge", "of"])
    for name, counts in run.judged.items():
        asked.add_metric([name], counts["calls"])
        failed.add_metric([name, "unanswered"], counts["unanswered"])
        failed.add_metric([name, "no_verdict"], counts["without_verdict"])
        tokens.add_metric([name, "prompt"], counts["tokens_read"])
        tokens.add_metric([name, "completion"], counts["tokens_written"])
    yield from (asked, failed, tokens)


def _sessions(sessions: SessionFigures) -> Iterator[Metric]:
    yield _gauge("echo_sessions_open", "Open sessions of environments.", sessions.open)
    yield _gauge("echo_session_slots", "Sessions that may be open now; 0 = the environment is away.", sessions.slots)
    yield _gauge("echo_sessions_waiting", "Turns that wait for a session slot.", sessions.waiting)


def _dissemination(run: RunView) -> Iterator[Metric]:
    fetches = CounterMetricFamily("echo_fetches", "Versions fetched by nodes.", labels=["transport"])
    yield _labelled(fetches, (([transport], number) for transport, number in run.fetches_by_transport.items()))
    yield _gauge("echo_hub_uplink_bytes_per_second", "The hub's uplink, set or measured.", run.uplink_bytes_s)
    yield _gauge("echo_nodes_on_newest_version", "Connected nodes that hold the newest version.", run.nodes_on_newest)
    for newest in run.versions[:1]:
        yield _gauge("echo_version_size_bytes", "Size of the newest version's adapter.", newest.size_bytes)
        yield _gauge("echo_version_payload_bytes", "Transferred size of that version.", newest.record.payload_bytes)
        sources = GaugeMetricFamily(
            "echo_version_fetched_bytes", "Bytes of the newest version fetched, by source.", labels=["source"]
        )
        yield _labelled(sources, (([source], number) for source, number in newest.record.bytes_by_transport.items()))
        yield _seconds(
            "echo_version_dissemination_seconds", "Time until this share of nodes had the version.", newest.record
        )
    if run.dissemination is not None:
        told, reached = run.dissemination.num_told, run.dissemination.num_reached
        yield _gauge("echo_version_nodes_told", "Nodes told of the newest version.", told)
        yield _gauge("echo_version_nodes_reached", "Nodes told that have that version.", reached)
    for version in (view.record for view in run.versions):
        if version.policy_version == run.newest_complete:
            number = version.policy_version
            yield _gauge("echo_complete_version", "The newest version that all nodes told of it have.", number)
            yield _seconds("echo_complete_version_dissemination_seconds", "Until this share of nodes had it.", version)


def _capacity(capacity: CapacityView) -> Iterator[Metric]:
    yield _gauge("echo_learner_idle_ratio", "Share of recent time without training, 0..1.", capacity.idle_share)
    reasons = GaugeMetricFamily("echo_learner_idle_reason_ratio", "The idle share by its reason.", labels=["reason"])
    yield _labelled(reasons, (([reason], share) for reason, share in capacity.idle_by_reason.items()))
    expected = capacity.predicted_utilisation
    yield _gauge("echo_capacity_utilisation_ratio", "Share of time with training, by the model, 0..1.", expected)
    there, needed = capacity.rollouts_per_s, capacity.needed_per_s
    yield _gauge("echo_capacity_rollouts_per_second", "Rollouts that the connected nodes can return.", there)
    yield _gauge("echo_capacity_needed_rollouts_per_second", "Rollouts that a busy learner consumes.", needed)
    missing = capacity.missing_per_s
    yield _gauge("echo_capacity_missing_rollouts_per_second", "Throughput that the nodes lack.", missing)
    yield _gauge("echo_capacity_broadcast_seconds", "Time from training to nodes' fetch.", capacity.broadcast_s)
    nodes = GaugeMetricFamily("echo_capacity_nodes_to_add", "Nodes to add so that no step waits.", labels=["kind"])
    yield _labelled(nodes, (([row.kind], row.count) for row in capacity.advised_nodes if row.count is not None))
    bound = capacity.advised_staleness
    yield _gauge("echo_capacity_staleness_bound_needed", "Smallest bound that keeps the learner busy.", bound)


def _curriculum(curriculum: CurriculumView) -> Iterator[Metric]:
    known = GaugeMetricFamily(
        "echo_curriculum", "Problems, or tasks, by their newest pass rate.", labels=["difficulty"]
    )
    counts = {"solved": curriculum.solved, "hopeless": curriculum.hopeless, "between": curriculum.between}
    yield _labelled(known, (([name], count) for name, count in counts.items()))
    passed_over = CounterMetricFamily("echo_problems_passed_over", "Problems that the curriculum left out.")
    yield _labelled(passed_over, [([], curriculum.passed_over)])


def _cost(cost: CostView) -> Iterator[Metric]:
    total = CounterMetricFamily("echo_cost_dollars", "Cost of nodes while active, in US dollars.")
    yield _labelled(total, [([], cost.total)])
    yield _gauge("echo_cost_dollars_per_hour", "Hourly cost of the active nodes.", cost.spend_per_hour)
    yield _gauge("echo_cost_cap_dollars_per_hour", "Upper limit of the hourly cost.", cost.spend_cap_per_hour)
    each = cost.per_trained_rollout
    yield _gauge("echo_cost_dollars_per_trained_rollout", "The total over all rollouts trained on.", each)
    states = GaugeMetricFamily("echo_nodes_priced", "Connected nodes that cost something.", labels=["state"])
    yield _labelled(states, [(["active"], cost.nodes_active), (["standby"], cost.nodes_standing_by)])


def _trust(trust: TrustStatus) -> Iterator[Metric]:
    checks = CounterMetricFamily("echo_checks", "Verdicts on nodes' rollouts.", labels=["numerics", "result"])
    for numerics, number in trust.checks.items():
        failed = trust.failed_checks.get(numerics, 0)
        checks.add_metric([numerics, "passed"], number - failed)
        checks.add_metric([numerics, "failed"], failed)
    yield checks
    abandoned = CounterMetricFamily("echo_checks_abandoned", "Rollouts that could not be checked.")
    yield _labelled(abandoned, [([], trust.abandoned_checks)])
    yield _gauge("echo_checks_waiting", "Rollouts that wait for their check.", trust.waiting_checks)
    yield _gauge("echo_checkers", "Connected nodes that check others.", trust.checkers)
    opinions = CounterMetricFamily("echo_check_opinions", "Checks by nodes of others' rollouts.", labels=["result"])
    yield _labelled(opinions, [(["all"], trust.opinions), (["outvoted"], trust.outvoted)])
    disagreements = CounterMetricFamily("echo_check_disagreements", "Rollouts whose first two checks disagreed.")
    yield _labelled(disagreements, [([], trust.disagreements)])
    tokens = CounterMetricFamily("echo_check_tokens", "Tokens recomputed by nodes for checks.")
    yield _labelled(tokens, [([], trust.checked_tokens)])
    yield _gauge("echo_nodes_quarantined", "Nodes without work, because they are not trusted.", trust.quarantined)
    yield _gauge("echo_verdicts_suspended", "Checks failed by too many nodes to blame any.", len(trust.suspended))


def _seconds(name: str, help_text: str, version: VersionRecord) -> Metric:
    """Return a gauge of the seconds from the announcement until a share of the nodes had the complete, verified
    version.

    The label is not called `quantile`, because that name is reserved for summaries.
    """
    known = {
        "0.5": version.dissemination_p50_s,
        "0.95": version.dissemination_p95_s,
        "1": version.dissemination_max_s,
    }
    family = GaugeMetricFamily(name, help_text, labels=["share"])
    return _labelled(family, (([share], value) for share, value in known.items() if value is not None))


def _fleet(nodes: FleetView) -> Iterator[Metric]:
    here = [node for node in nodes.here.values() if node.connected]
    connected = GaugeMetricFamily("echo_nodes_connected", "Connected nodes by activity.", labels=["activity"])
    yield _labelled(connected, (([a], n) for a, n in sorted(Counter(node.activity for node in here).items())))
    standings = Counter(node.totals.standing or "unchecked" for node in here)
    standing = GaugeMetricFamily("echo_nodes_standing", "Connected nodes by trust standing.", labels=["standing"])
    yield _labelled(standing, (([name], number) for name, number in sorted(standings.items())))
    speed = sum(node.tokens_per_s for node in here)
    yield _gauge("echo_nodes_tokens_per_second", "Sampling speed of all connected nodes, by their reports.", speed)


def _nodes(nodes: FleetView) -> Iterator[Metric]:
    about = GaugeMetricFamily(
        "echo_node_info", "The node's own description.", labels=["node", "name", "backend", "device"]
    )
    yield _labelled(about, (([n.totals.node_id, n.totals.name, n.totals.backend, n.totals.device], 1.0) for n in nodes))
    up = GaugeMetricFamily("echo_node_connected", "1 while the node is connected.", labels=["node"])
    yield _labelled(up, (([n.totals.node_id], float(n.connected)) for n in nodes))
    standing = GaugeMetricFamily("echo_node_standing", "1 for the node's trust standing.", labels=["node", "standing"])
    yield _labelled(standing, (([n.totals.node_id, n.totals.standing], 1.0) for n in nodes if n.totals.standing))
    verified = GaugeMetricFamily("echo_node_verified_in_a_row", "Its checked rollouts that passed.", labels=["node"])
    yield _labelled(verified, (([n.totals.node_id], n.totals.verified_in_a_row) for n in nodes if n.totals.checks))
    speed = GaugeMetricFamily("echo_node_tokens_per_second", "Sampling speed, by the node's report.", labels=["node"])
    yield _labelled(speed, (([n.totals.node_id], n.tokens_per_s) for n in nodes))
    paid = CounterMetricFamily("echo_node_cost_dollars", "Cost of the node, in US dollars.", labels=["node"])
    yield _labelled(paid, (([n.totals.node_id], n.totals.cost) for n in nodes if n.totals.cost))
    standby = GaugeMetricFamily("echo_node_standby", "1 while the node stands by without work.", labels=["node"])
    yield _labelled(standby, (([n.totals.node_id], float(bool(n.standby))) for n in nodes if n.connected))
    version = GaugeMetricFamily("echo_node_policy_version", "Newest version it can sample from.", labels=["node"])
    yield _labelled(version, (([n.totals.node_id], n.policy_version) for n in nodes if n.policy_version is not None))
    received = CounterMetricFamily("echo_node_rollouts_received", "Rollouts received from the node.", labels=["node"])
    yield _labelled(received, (([n.totals.node_id], n.totals.received) for n in nodes))
    ended = CounterMetricFamily("echo_node_rollouts", "The node's rollouts in a final state.", labels=["node", "state"])
    for node in nodes:
        ended.add_metric([node.totals.node_id, "trained"], node.trained)
        ended.add_metric([node.totals.node_id, "evaluated"], node.evaluated)
        ended.add_metric([node.totals.node_id, "answered"], node.totals.answered_rollouts)
        ended.add_metric([node.totals.node_id, "dropped"], node.totals.dropped)
    yield ended
