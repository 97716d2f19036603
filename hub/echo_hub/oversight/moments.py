"""The part of the hub's current state that only its memory holds, not the database. Pages and alerts use it."""

from __future__ import annotations

from collections.abc import Sequence

from echo_hub.config.sections import HubConfig
from echo_hub.core.status import CoordinatorStatus
from echo_hub.dashboard.session_figures import SessionFigures
from echo_hub.distribution.service import DistributionService
from echo_hub.driving.shared import Shared
from echo_hub.intake.service import IntakeService
from echo_hub.net.joining import install_command, join_command, windows_install_command
from echo_hub.net.server import Server
from echo_hub.operation.problems import RunProblems
from echo_hub.sessions.host import SessionHost
from echo_hub.sinks.following import Following
from echo_hub.training.service import TrainingService
from echo_hub.training.trainer import LearnerState
from echo_hub.verify.verifying import Verifying
from echo_hub.views.run import Moment


class Moments:
    """Collects the current state of all services."""

    def __init__(
        self,
        shared: Shared,
        *,
        intake: IntakeService,
        training: TrainingService,
        distribution: DistributionService,
        verifying: Verifying,
        problems: RunProblems,
        sinks: Sequence[Following],
        server: Server,
    ) -> None:
        self._shared = shared
        self._intake = intake
        self._training = training
        self._distribution = distribution
        self._verifying = verifying
        self._problems = problems
        self._sinks = sinks
        self._server = server

    def now(self) -> Moment:
        """Return the current state. Call it on the hub's event loop."""
        resources, progress = self._shared.resources, self._shared.progress
        config, scoring, evaluator = resources.config, resources.scoring, self._training.evaluator
        status = resources.coordinator.status()
        return Moment(
            status=status,
            distribution=self._distribution.distributor.status(),
            num_received=progress.num_received,
            rollouts_gone_on=self._intake.partials.num_gone_on,
            tokens_saved=self._intake.partials.tokens_saved,
            trains=config.trains,
            learner_is_starting=config.trains and self._training.trainer.state is LearnerState.STARTING,
            learner_is_down=self._training.trainer.state is LearnerState.DOWN,
            learner_evaluates=self._training.trainer.evaluates,
            last_is_published=progress.last_is_published,
            finished=progress.finished.is_set(),
            sinks=tuple(sink.problem for sink in self._sinks if sink.problem is not None),
            join_command=join_command(config, self._server),
            install_command=install_command(config, self._server),
            windows_install_command=windows_install_command(config, self._server),
            address=self._server.shared_url,
            turned_away=self._shared.connections.turned_away(resources.tracker.refused),
            judges_away=scoring.judges.absent,
            scoring_away=scoring.absence,
            sessions=session_figures(resources.sessions, config, status),
            verifier_away=self._verifying.absence,
            evaluator_away="" if evaluator is None else evaluator.absence,
            judged=scoring.judges.counts,
            needs_nodes=config.needs_nodes,
            watched=self._problems.active,
            lacks_room=resources.store.room.lacks,
            lacks_database=resources.store.server.lacks,
        )


def session_figures(host: SessionHost | None, config: HubConfig, status: CoordinatorStatus) -> SessionFigures | None:
    """Return the figures of the run's sessions; None if no task of the run has sessions."""
    if host is None:
        return None
    return SessionFigures(
        open=host.num_open,
        slots=host.slots,
        most=config.sessions.most,
        waiting=host.num_waiting,
        is_short=status.lacks_session_slots,
        away=host.absence,
        away_since=host.away_since,
    )
