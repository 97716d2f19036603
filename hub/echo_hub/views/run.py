"""The view of the whole run: state, problems, accounting, evaluations and versions."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, Protocol

from echo_hub.config.sections import HubConfig
from echo_hub.core.policy.curriculum import CurriculumStatus
from echo_hub.core.status import CoordinatorStatus
from echo_hub.dashboard.model import (
    CostView,
    CurriculumView,
    Doing,
    EvaluationSetView,
    RunState,
    RunView,
    SiblingView,
)
from echo_hub.dashboard.session_figures import SessionFigures
from echo_hub.operation.problems import ProblemKind, RunProblem
from echo_hub.operation.state import health_of
from echo_hub.spread.holdings import DistributionStatus
from echo_hub.store.events import read_events
from echo_hub.store.reports import (
    read_accounting,
    read_costs,
    read_newest_step,
    read_num_nodes,
    read_versions_by_transport,
)
from echo_hub.store.store import Store
from echo_hub.views.alarms import alarms
from echo_hub.views.capacity import CapacityViews
from echo_hub.views.evaluations import EVALUATIONS_SHOWN, EvaluationViews, thinned
from echo_hub.views.live import configured, with_live
from echo_hub.views.recent_work import RecentWorkViews
from echo_hub.views.versions import VersionViews, dissemination_view
from echo_shared.records.health import Health
from echo_shared.records.run import EventFilter

EVENTS_KEPT: Final = 50
"""Number of newest events shown, counted over all kinds of events."""
LEARNER_IS_DOWN: Final = (
    "The learner process has died and is being restarted. If it dies again, `echo-hub log RUN` says why."
)
DISK_IS_FULL: Final = (
    "The disk is full ({said}): writing and training wait until there is space. Free some; nothing is lost."
)
DATABASE_IS_AWAY: Final = (
    "The database server is unavailable ({said}): nothing is leased, acknowledged or trained until it is back. Check "
    "that it runs and that this machine reaches it. The hub then resumes by itself, and nothing is lost."
)
COMMON_FAULT: Final = (
    "So many nodes fail their checks that it may not be their fault: {what}. Failed rollouts are not trained, and no "
    "node is quarantined for it. Check the version, the task, and whether the verifier supports such engines."
)
COARSER: Final = (
    "Numerics, not forgery: all nodes of {what} round more than this hub measured for their precision. They are judged "
    "by their own deviation, so finding forged tokens among theirs takes longer. Check their engine's version, kernels "
    "and cache type."
)
NODE_LAGS: Final = (
    "Node {node_id}: {what} Ask its owner to restart it, and check how its engine loads a new version. If it is "
    "in quarantine, pardon it afterwards."
)
VERSION_IS_WITHDRAWN: Final = (
    "Policy version {version} is withdrawn ({reason}) and no longer leased. The run continues with the version before "
    "it, while that is fresh enough, and with the next one. If that one is withdrawn too, stop the hub and restore the "
    "run from a backup, with a smaller training.learning_rate."
)
JUDGE_IS_AWAY: Final = (
    "The judge {name} does not answer ({reason}). Rollouts wait for it, and nothing is lost: check that it runs, and "
    "reward.judges.{name} in the settings."
)
SCORERS_ARE_AWAY: Final = (
    "No scorer works in the Ray cluster ({reason}). Rollouts wait, and nothing is lost: check that the cluster runs, "
    "and [ray] in the settings."
)
ENVIRONMENT_IS_AWAY: Final = (
    "The environment has not answered since {since} ({reason}). Its sessions wait, and no new group is opened. The hub "
    "keeps trying, and then rebuilds the sessions from the stored turns; nothing is lost. Check that the environment's "
    "server runs."
)
SLOTS_ARE_SHORT: Final = (
    "Session slots are short: {open} of {slots} are in use, and {what} for more. The run continues, more slowly. "
    "{remedy}"
)
MORE_SLOTS: Final = "If memory allows, raise sessions.most in the settings."
MORE_SESSIONS: Final = (
    "The settings allow {most} (sessions.most), but the environment's server takes no more: let it take more sessions "
    "at once."
)
VERIFIER_IS_AWAY: Final = (
    "No verifier works in the Ray cluster ({reason}). Checks and the rollouts of new nodes wait: check that the "
    "cluster runs, and [ray] in the settings."
)
EVALUATOR_IS_AWAY: Final = (
    "No evaluator works in the Ray cluster ({reason}). Evaluations wait, and training continues: check that the "
    "cluster runs, and [ray] in the settings."
)
LEASING: Final = {"paused": Doing.PAUSED, "draining": Doing.DRAINING, "drained": Doing.DRAINED}
DETAILS: Final = {
    Doing.STARTING: "starting the learner",
    Doing.LEARNER_DOWN: "restarting the learner",
    Doing.PAUSED: "paused by the operator: nothing is leased",
    Doing.DRAINING: "draining by the operator: only open groups are leased",
    Doing.DRAINED: "drained by the operator: no work is in progress",
    Doing.LACKS_NODES: "waiting for nodes",
    Doing.COLLECTING: "collecting rollouts",
    Doing.TRAINING: "training",
    Doing.SERVING: "working for tenants",
    Doing.EVALUATING: "evaluating",
    Doing.FINISHED: "",
}
"""What the run does now, in words, for each `Doing`; "" when the run is over."""
_EVALUATES: Final = "; the learner evaluates"


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The part of the hub's current state that the database does not hold."""

    status: CoordinatorStatus
    distribution: DistributionStatus
    num_received: int
    rollouts_gone_on: int
    """Rollouts received since the hub's start that resumed an unfinished rollout."""
    tokens_saved: int
    """Tokens that resumed rollouts kept instead of sampling them again."""
    learner_is_starting: bool
    """True while the learner starts for the first time, before anything can be trained."""
    learner_is_down: bool
    """True while the learner restarts after a failure."""
    learner_evaluates: bool
    """True while the learner samples completions for an evaluation."""
    last_is_published: bool
    """True after the run's last version is published: no more training work is leased."""
    finished: bool
    join_command: str
    install_command: str = ""
    windows_install_command: str = ""
    address: str = ""
    turned_away: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Number of refusals since the hub's start, by kind (such as connection or passkey) and by reason."""
    judges_away: Mapping[str, str] = field(default_factory=dict)
    """Reason why a judge (a model that scores answers) has not answered for a while, by the judge's name."""
    scoring_away: str = ""
    """Why scoring waits for its processes; "" if it does not wait."""
    sessions: SessionFigures | None = None
    """Sessions of environments with state; None if the run has none."""
    verifier_away: str = ""
    """Why verifying waits for its process; "" if it does not wait."""
    evaluator_away: str = ""
    """Why evaluating waits for its process; "" if it does not wait."""
    judged: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    needs_nodes: bool = True
    """True if the run needs nodes; False if the hub samples by itself."""
    trains: bool = True
    """False if the run has no task, and works only for tenants."""
    lacks_room: str = ""
    """The disk-full message if a writer is waiting, else ""."""
    lacks_database: str = ""
    """The database-unavailable message if a writer is waiting, else ""."""
    watched: tuple[RunProblem, ...] = ()
    """Problems that the hub's monitoring finds now."""
    sinks: tuple[str, ...] = ()
    """Errors of metric sinks, such as TensorBoard. The run continues without them."""


class Siblings(Protocol):
    """Other runs of the same hub: `echo_hub.lifecycle.sibling_runs`."""

    @property
    def views(self) -> tuple[SiblingView, ...]: ...


class MomentSource(Protocol):
    """Supplies the hub's momentary state: `echo_hub.oversight.moments`."""

    def now(self) -> Moment: ...


class RunViews:
    """Builds `RunView` from the database and a `Moment`. `read` is thread-safe."""

    def __init__(
        self,
        config: HubConfig,
        *,
        run_id: str,
        started_at: float,
        first_version: int = 0,
        lineage: tuple[str, ...] = (),
        store: Store,
        versions: VersionViews,
        evaluations: EvaluationViews,
        siblings: Siblings | None = None,
    ) -> None:
        self._config = config
        self._run_id = run_id
        self._started_at = started_at
        self._first_version = first_version
        self._lineage = lineage
        self._store = store
        self._versions = versions
        self._evaluations = evaluations
        self._siblings = siblings
        self._capacity = CapacityViews(store=store, started_at=started_at)
        self._work = RecentWorkViews(store)

    def read(self, moment: Moment, *, rollouts_per_s: float, connected: Collection[str]) -> RunView:
        """Return the run's view. `connected` are the ids of connected nodes that may get work: those that the spend cap
        excludes are missing."""
        status, distribution = moment.status, moment.distribution
        config = with_live(self._config, status.settings) if status.settings else self._config
        # Read the database, not the coordinator: its newest step may not be committed yet.
        newest = self._store.read(read_newest_step)
        warnings = alarms(newest)
        warnings += noticed(moment, is_told=bool(warnings))
        warnings += moment.sinks
        by_set, accounting = self._evaluations.read(), self._store.read(read_accounting)
        evaluations = by_set.pop("")
        now = doing(moment)
        evaluates = moment.learner_evaluates and now is Doing.COLLECTING
        num_nodes = self._store.read(read_num_nodes)
        return RunView(
            as_of=time.time(),
            run_id=self._run_id,
            name=config.run.name,
            mode=config.run.mode,
            task=config.task.label,
            trains=config.trains,
            tasks=tuple(key for key, task in config.task.mixture.items() if task.weight),
            base_model=config.model.base,
            join_command=moment.join_command,
            install_command=moment.install_command,
            windows_install_command=moment.windows_install_command,
            address=moment.address,
            state=RunState.FINISHED if moment.finished else RunState.RUNNING,
            state_detail=DETAILS[now] + (_EVALUATES if evaluates else ""),
            doing=now,
            health=health(moment),
            problems=(*problems(moment), *warnings),
            alarms=warnings,
            problem_kinds=tuple(problem.kind.value for problem in moment.watched),
            starting=moment.learner_is_starting,
            started_at=self._started_at,
            finished_at=evaluations[-1].greedy.evaluated_at if moment.finished else None,
            steps_total=config.training.steps,
            first_version=self._first_version,
            lineage=self._lineage,
            trained_step=newest.step if newest else self._first_version,
            published_version=status.published_version,
            group_size=config.training.group_size,
            max_staleness=config.training.max_staleness if config.run.mode == "async" else 0,
            leasing=status.leasing,
            live={str(name): value for name, value in configured(config).items()},
            newest_step=newest,
            rollouts_per_s=rollouts_per_s,
            rollouts_gone_on=moment.rollouts_gone_on,
            tokens_saved=moment.tokens_saved,
            turned_away=moment.turned_away,
            curriculum=_curriculum(status.curriculum),
            judged=moment.judged,
            sessions=moment.sessions,
            buffered_groups=status.groups_buffered,
            accounting=accounting,
            cost=self._cost(config, status, accounting.trained),
            trust=status.trust,
            evaluations=thinned(evaluations, EVALUATIONS_SHOWN),
            evaluation_sets=tuple(
                EvaluationSetView(name=name, evaluations=thinned(views, EVALUATIONS_SHOWN))
                for name, views in by_set.items()
            ),
            versions=self._versions.read(),
            fetches_by_transport=self._store.read(read_versions_by_transport),
            dissemination=dissemination_view(distribution.newest) if distribution.newest else None,
            newest_complete=distribution.newest_complete,
            nodes_on_newest=distribution.num_holding,
            nodes_connected=distribution.num_connected,
            nodes_known=num_nodes.known,
            nodes_useful=num_nodes.useful,
            uplink_bytes_s=distribution.uplink_bytes_s,
            events=tuple(self._store.read(read_events, EventFilter(), EVENTS_KEPT)),
            work=self._work.read(),
            capacity=self._capacity.read(config, None if moment.finished else connected, waits_for=waits_for(moment)),
            siblings=() if self._siblings is None else self._siblings.views,
        )

    def _cost(self, config: HubConfig, status: CoordinatorStatus, trained: int) -> CostView | None:
        totals = self._store.read(read_costs)
        if not status.nodes_priced and not totals.active_s:
            return None
        return CostView(
            spend_per_hour=status.spend_per_hour,
            spend_cap_per_hour=config.cost.spend_cap_per_hour,
            total=totals.dollars,
            active_s=totals.active_s,
            per_trained_rollout=totals.dollars / trained if trained else None,
            nodes_active=status.nodes_active,
            nodes_standing_by=status.nodes_priced - status.nodes_active,
        )


def _curriculum(status: CurriculumStatus | None) -> CurriculumView | None:
    if status is None:
        return None
    return CurriculumView(
        by=status.by,
        solved=status.num_solved,
        hopeless=status.num_hopeless,
        between=status.num_between,
        passed_over=status.num_passed_over,
    )


def problems(moment: Moment) -> tuple[str, ...]:
    """Return a text for each problem that keeps the hub from working now, and for each fault that many nodes share."""
    return (*broken_now(moment).values(), *common_faults(moment))


def broken_now(moment: Moment) -> dict[ProblemKind, str]:
    """Return the problems that keep the hub from working now, with a text for each."""
    down = {ProblemKind.LEARNER_DOWN: LEARNER_IS_DOWN} if moment.learner_is_down else {}
    full = {ProblemKind.DISK_FULL: DISK_IS_FULL.format(said=moment.lacks_room)} if moment.lacks_room else {}
    away = " ".join(moment.lacks_database.split())
    base = {ProblemKind.DATABASE_AWAY: DATABASE_IS_AWAY.format(said=away)} if away else {}
    said = " ".join(JUDGE_IS_AWAY.format(name=name, reason=reason) for name, reason in moment.judges_away.items())
    judges = {ProblemKind.JUDGE_AWAY: said} if said else {}
    gone = {
        kind: text.format(reason=reason)
        for kind, text, reason in (
            (ProblemKind.SCORERS_AWAY, SCORERS_ARE_AWAY, moment.scoring_away),
            (ProblemKind.VERIFIER_AWAY, VERIFIER_IS_AWAY, moment.verifier_away),
            (ProblemKind.EVALUATOR_AWAY, EVALUATOR_IS_AWAY, moment.evaluator_away),
        )
        if reason
    }
    return {**down, **full, **base, **judges, **gone, **_environment_away(moment.sessions)}


def _environment_away(sessions: SessionFigures | None) -> dict[ProblemKind, str]:
    if sessions is None or not sessions.away:
        return {}
    since = "a moment ago"
    if sessions.away_since is not None:
        since = f"{datetime.fromtimestamp(sessions.away_since, UTC):%H:%M} UTC"
    return {ProblemKind.ENVIRONMENT_AWAY: ENVIRONMENT_IS_AWAY.format(since=since, reason=sessions.away)}


def _slots_short(sessions: SessionFigures | None) -> str:
    if sessions is None or sessions.away or not (sessions.waiting or sessions.is_short):
        return ""
    turns = f"{sessions.waiting} turn{'s wait' if sessions.waiting > 1 else ' waits'}"
    what = " and ".join([*([turns] if sessions.waiting else []), *(["a new group waits"] if sessions.is_short else [])])
    remedy = MORE_SLOTS if sessions.slots >= sessions.most else MORE_SESSIONS.format(most=sessions.most)
    return SLOTS_ARE_SHORT.format(open=sessions.open, slots=sessions.slots, what=what, remedy=remedy)


def _beside(moment: Moment) -> set[ProblemKind]:
    """Return the kinds of monitored problems that `broken_now` shows already, so that `noticed` leaves them out."""
    always = (
        ProblemKind.LEARNER_DOWN,
        ProblemKind.DISK_FULL,
        ProblemKind.DATABASE_AWAY,
        ProblemKind.JUDGE_AWAY,
        ProblemKind.SCORERS_AWAY,
        ProblemKind.ENVIRONMENT_AWAY,
        ProblemKind.VERIFIER_AWAY,
        ProblemKind.EVALUATOR_AWAY,
    )
    return {*always, *([ProblemKind.DISK] if moment.lacks_room else [])}


def common_faults(moment: Moment) -> tuple[str, ...]:
    """Return a text for each fault that so many nodes share that the nodes themselves cannot be its cause."""
    trust = moment.status.trust
    return (
        *(COMMON_FAULT.format(what=what) for what in trust.suspended),
        *(COARSER.format(what=what) for what in trust.coarser),
    )


def goes_on_with(moment: Moment) -> dict[ProblemKind, str]:
    """Return the faults despite which the run continues, each with a text."""
    status = moment.status
    withdrawn = (VERSION_IS_WITHDRAWN.format(version=one, reason=why) for one, why in sorted(status.withdrawn.items()))
    lagging = (NODE_LAGS.format(node_id=node_id, what=what) for node_id, what in status.trust.lagging)
    said = {
        ProblemKind.VERSION_WITHDRAWN: " ".join(withdrawn),
        ProblemKind.NODE_LAGS: " ".join(lagging),
        ProblemKind.SLOTS_SHORT: _slots_short(moment.sessions),
    }
    return {kind: text for kind, text in said.items() if text}


def noticed(moment: Moment, *, is_told: bool) -> tuple[str, ...]:
    """Return the texts of monitored problems that are shown nowhere else. `is_told` is True if the newest step's alarms
    are shown already.
    """
    told = {ProblemKind.COMMON_FAULT, *([ProblemKind.ATTACK] if is_told else []), *_beside(moment)}
    return tuple(problem.text for problem in moment.watched if problem.kind not in told)


def lacks_nodes(moment: Moment) -> bool:
    return moment.needs_nodes and not moment.status.nodes_connected


def health(moment: Moment) -> Health:
    return health_of(
        is_finished=moment.finished,
        is_starting=moment.learner_is_starting,
        broken=problems(moment),
        lacks_nodes=lacks_nodes(moment) and not moment.last_is_published,
        watched=tuple(problem for problem in moment.watched if problem.kind not in _beside(moment)),
    )


def waits_for(moment: Moment) -> str | None:
    """Return the reason for which the learner waits, one of `learner_time.REASONS`; None if it trains or has nothing
    left to do."""
    if moment.finished or moment.last_is_published or not moment.trains:
        return None
    if moment.learner_is_down or moment.learner_is_starting:
        return "down"
    return "rollouts" if moment.status.training_step is None else None


def doing(moment: Moment) -> Doing:
    """Return the run's current activity. If several states apply, return the state that must end first."""
    if moment.finished:
        return Doing.FINISHED
    if moment.learner_is_starting:
        return Doing.STARTING
    if moment.learner_is_down:
        return Doing.LEARNER_DOWN
    if moment.last_is_published:
        return Doing.EVALUATING
    if moment.status.leasing != "open":
        return LEASING[moment.status.leasing]
    if lacks_nodes(moment):
        return Doing.LACKS_NODES
    if not moment.trains:
        return Doing.SERVING
    return Doing.TRAINING if moment.status.training_step is not None else Doing.COLLECTING
