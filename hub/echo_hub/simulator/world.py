"""A run in virtual time: the hub's own coordinator, with simulated nodes, learner, scorer and network.

Everything that happens is an entry of the agenda, a queue of future events. Some entries pass an event to the
coordinator, whose effects add more entries. All randomness comes from the seed: the same scenario gives the same run.

Simplifications: a node's slots are equally fast, however many are busy. If a version's arrival is computed by the
formula (`SimulatedPublication`), a node fetches one version at a time, always the newest. Leases and versions do not
share connections. A rollout has the same length whichever node samples it. Tokens and rewards are made up unless the
run gets real `work`; nodes are drawn from the scenario unless the run gets those of a real fleet.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from math import exp, inf
from typing import Any, Final

import numpy as np

from echo_hub.core.accounting.effects import (
    ActionSettled,
    AnnounceVersion,
    AnswerOpened,
    AnswerReplaced,
    AnswersCancelled,
    BeginStep,
    CheckingCredited,
    CheckRecorded,
    CheckRollout,
    CloseSession,
    CoarseClassesRecorded,
    CostAccrued,
    DeliverAnswer,
    Effect,
    EvaluationDone,
    FinishRun,
    GroupDropped,
    GroupOpened,
    GroupsRated,
    HandOver,
    HastenChecks,
    LookUpReceipt,
    MeasureNumerics,
    PrepareGroup,
    PublishVersion,
    RevokeLease,
    RolloutReceived,
    RolloutsAnswered,
    RolloutsDropped,
    RolloutsEvaluated,
    RolloutsLeased,
    ScoreRecorded,
    ScoreRollout,
    SendCheck,
    SendLease,
    SendReceipts,
    SendTrained,
    SessionNoted,
    SettingRecorded,
    StandingRecorded,
    StepPlanned,
    StepTrained,
    TellOperator,
    TellStandby,
    TrainStep,
    TrustDecided,
    VersionRecorded,
)
from echo_hub.core.accounting.events import (
    Event,
    LearnerReady,
    RolloutScored,
    SlotsChanged,
    StepDone,
    Tick,
    VersionPublished,
)
from echo_hub.core.accounting.parameters import SessionRules
from echo_hub.core.accounting.snapshot import CoordinatorSnapshot
from echo_hub.core.coordinator import Coordinator
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.simulator.accounts import Accounts
from echo_hub.simulator.agenda import Agenda
from echo_hub.simulator.core_cost import MeteredCore
from echo_hub.simulator.costs import Costs, activation_settings
from echo_hub.simulator.fleet import SimulatedFleet
from echo_hub.simulator.hours import Hours
from echo_hub.simulator.population import Traits
from echo_hub.simulator.scenario import Scenario
from echo_hub.simulator.sessions import SimulatedHost
from echo_hub.simulator.work import MadeUp, SimulatedWork

LIARS_FROM_S: Final = 60.0
"""Virtual seconds from which rollouts leased to liars (nodes that return nothing) are counted: before, the coordinator
cannot know these nodes."""
UNTOLD: Final = 500
"""After this many agenda entries in a row that send the coordinator no event, `gc.freeze` is called, so that garbage
collection during the coordinator's events does not scan the simulated nodes' objects."""
_TICK: Final = Tick()


MakeCoordinator = Callable[[CoordinatorSettings, CoordinatorSnapshot], Coordinator]


class World:
    """A simulated run.

    `clock` measures only what the coordinator itself costs. `make` creates the coordinator, for example another one to
    compare with. `work`: what is sampled and trained; `nodes`: the nodes that sample. Both are made up by default.
    """

    def __init__(
        self,
        scenario: Scenario,
        clock: Callable[[], float] = lambda: 0.0,
        *,
        make: MakeCoordinator = Coordinator,
        work: SimulatedWork | None = None,
        nodes: Sequence[Traits] | None = None,
    ) -> None:
        self.scenario = scenario
        self.finished = False
        self.core = MeteredCore(make(coordinator_settings(scenario), CoordinatorSnapshot()), clock)
        self.accounts = Accounts(
            group_size=scenario.training.group_size,
            warm_up_steps=scenario.measuring.warm_up_steps,
            liars_from_s=LIARS_FROM_S,
        )
        self.work = work or MadeUp(scenario)
        self.sessions = SimulatedHost(scenario) if scenario.sessions.slots else None
        self.costs = Costs()
        self.agenda = Agenda()
        self.hours = Hours()
        self.fleet = SimulatedFleet(
            scenario, agenda=self.agenda, hub=self, work=self.work, hours=self.hours, nodes=nodes
        )
        self.steps: list[tuple[float, float]] = []
        """(begin, end) of each step in virtual seconds, in order, including the step in progress."""
        self._untold = 0
        """Agenda entries since the coordinator's last event."""
        self._learner_free_at = -inf
        self._exporter_free_at = -inf
        self._jitter = np.random.default_rng([scenario.run.seed, 3])

    def run(self) -> None:
        """Run to the last step, or to the limit of virtual time."""
        agenda, core = self.agenda, self.core
        self._carry_out(core.start(agenda.now))
        self.fleet.begin()
        self.tell(LearnerReady(policy_version=0))
        if self.sessions is not None:
            self.tell(SlotsChanged(slots=self.scenario.sessions.slots))
        limit_s = self.scenario.measuring.limit_s
        while not self.finished:
            tick_at = core.tick_at
            if min(tick_at, agenda.next_at) > limit_s:
                agenda.now = limit_s
                return
            if tick_at <= agenda.next_at:
                agenda.now = max(agenda.now, tick_at)
                self.tell(_TICK)
            else:
                agenda.advance()
                self._untold += 1
                if self._untold % UNTOLD == 0:
                    gc.freeze()

    def tell(self, event: Event) -> None:
        self._untold = 0
        self._carry_out(self.core.handle(event, self.agenda.now))

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            CARRY_OUT[type(effect)](self, effect)

    # --- records

    def _leased(self, record: RolloutsLeased) -> None:
        self.accounts.lease(record, self.fleet.node(record.node_id), self.agenda.now)
        self.hours.lease(len(record.indices), self.agenda.now)

    def _dropped(self, record: RolloutsDropped) -> None:
        self.accounts.drop(record)
        self.work.record(record)
        self.hours.drop(record.reason, len(record.rollout_ids), self.agenda.now)

    def _planned(self, record: StepPlanned) -> None:
        self.accounts.plan(record)
        self.work.record(record)
        for group_id in record.group_ids:
            self.fleet.ended(group_id)

    def _group_dropped(self, record: GroupDropped) -> None:
        self.fleet.ended(record.group_id)

    def _answered(self, record: RolloutsAnswered) -> None:
        self.accounts.answer(record)

    def _trained(self, record: StepTrained) -> None:
        self.accounts.train(record)

    def _accrued(self, record: CostAccrued) -> None:
        self.costs.accrue(record, self.agenda.now)

    # --- actions

    def _prepare(self, action: PrepareGroup) -> None:
        event = self.work.prepare(action.group_id)
        self.agenda.at(self.agenda.now + self.scenario.learner.prepare_s, self.tell, event)

    def _score(self, action: ScoreRollout) -> None:
        scored = RolloutScored(rollout_id=action.rollout_id, reward=self.work.score(action.rollout_id))
        event = scored if self.sessions is None else self.sessions.answer(scored)
        self.agenda.at(self.agenda.now + self.scenario.learner.score_s, self.tell, event)

    def _send_lease(self, action: SendLease) -> None:
        self.work.lease(action)
        if self.sessions is not None:
            self.sessions.lease(action)
        self.fleet.send_lease(action)

    def _revoke(self, action: RevokeLease) -> None:
        self.fleet.revoke(action)

    def _train(self, action: TrainStep) -> None:
        learner = self.scenario.learner
        seconds = learner.step_s + learner.step_s_per_rollout * self.accounts.batch[action.step]
        seconds *= exp(learner.step_jitter * self._jitter.standard_normal())
        begins_at = max(self.agenda.now, self._learner_free_at + learner.handoff_s)
        self._learner_free_at = begins_at + seconds
        self.steps.append((begins_at, self._learner_free_at))
        self.agenda.at(self._learner_free_at, self._step_ends, action.step)

    def _step_ends(self, step: int) -> None:
        self.tell(StepDone(step=step, metrics=self.work.train(step)))

    def _publish(self, action: PublishVersion) -> None:
        self.work.publish(action.policy_version)
        self._exporter_free_at = max(self.agenda.now, self._exporter_free_at) + self.scenario.publication.export_s
        self.agenda.at(self._exporter_free_at, self.tell, VersionPublished(policy_version=action.policy_version))

    def _announce(self, action: AnnounceVersion) -> None:
        self.fleet.announce(action.policy_version)

    def _told(self, action: TellStandby) -> None:
        self.costs.tell(action)

    def _finish(self, action: FinishRun) -> None:
        self.finished = True

    def _received(self, record: RolloutReceived) -> None:
        self.accounts.receive(record)
        self.work.record(record)

    def _scored(self, record: ScoreRecorded) -> None:
        self.work.record(record)

    def _ignore(self, effect: Effect) -> None:
        """Do nothing: the simulator has no database and no pages."""


def coordinator_settings(scenario: Scenario) -> CoordinatorSettings:
    training = scenario.training
    return CoordinatorSettings(
        mode=scenario.run.mode,
        steps=training.steps,
        groups_per_step=training.groups_per_step,
        group_size=training.group_size,
        deadline_s=scenario.leases.deadline_s,
        max_staleness=training.max_staleness,
        publish_every=training.publish_every,
        interrupts=training.on_new_version == "interrupt",
        run_seed=scenario.run.seed,
        multi_turn=scenario.sessions.slots > 0,
        session_rules=(lambda group_id: SessionRules()) if scenario.sessions.slots else None,
        activation=activation_settings(scenario),
    )


CARRY_OUT: Final[Mapping[type, Callable[[World, Any], None]]] = {
    RolloutsLeased: World._leased,
    RolloutsDropped: World._dropped,
    StepPlanned: World._planned,
    StepTrained: World._trained,
    RolloutsAnswered: World._answered,
    AnswerOpened: World._ignore,
    AnswersCancelled: World._ignore,
    DeliverAnswer: World._ignore,
    TellStandby: World._told,
    PrepareGroup: World._prepare,
    ScoreRollout: World._score,
    SendLease: World._send_lease,
    RevokeLease: World._revoke,
    HandOver: World._ignore,
    BeginStep: World._ignore,
    TrainStep: World._train,
    PublishVersion: World._publish,
    AnnounceVersion: World._announce,
    CostAccrued: World._accrued,
    FinishRun: World._finish,
    EvaluationDone: World._ignore,
    GroupDropped: World._group_dropped,
    GroupsRated: World._ignore,
    GroupOpened: World._ignore,
    LookUpReceipt: World._ignore,
    RolloutReceived: World._received,
    RolloutsEvaluated: World._ignore,
    ScoreRecorded: World._scored,
    AnswerReplaced: World._ignore,
    SessionNoted: World._ignore,
    CloseSession: World._ignore,  # A simulated session is no process.
    SendReceipts: World._ignore,
    SendTrained: World._ignore,
    VersionRecorded: World._ignore,
    CheckRollout: World._ignore,  # Trust is disabled in the simulator, so no rollout is checked.
    HastenChecks: World._ignore,
    MeasureNumerics: World._ignore,
    SendCheck: World._ignore,
    CheckingCredited: World._ignore,
    CheckRecorded: World._ignore,
    StandingRecorded: World._ignore,
    CoarseClassesRecorded: World._ignore,
    TrustDecided: World._ignore,
    SettingRecorded: World._ignore,
    ActionSettled: World._ignore,  # The simulator has no operator.
    TellOperator: World._ignore,
}
"""The handler of each effect; a test compares the keys with Effect."""
