"""The opened resources of a hub: files, database, child processes and the state that was read from them."""

from __future__ import annotations

from dataclasses import dataclass

from echo_hub.cluster.link import RayLink
from echo_hub.config.sections import HubConfig
from echo_hub.core.coordinator import Coordinator
from echo_hub.learner.settings import LearnerSettings
from echo_hub.net.invitations import Invitations
from echo_hub.net.publisher import Publisher
from echo_hub.net.tracker import Tracker
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.run.start import Start
from echo_hub.scoring.checks import SamplingBounds
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.store.async_store import AsyncStore
from echo_shared.process.supervised import SupervisedChild
from echo_shared.signing.identity import Identity


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Everything that a hub opens at its start and that its services need, in addition to the settings.
    `echo_hub.serving.opening.open_hub` opens and closes it."""

    config: HubConfig
    directory: RunDirectory
    me: Identity
    run_id: str
    store: AsyncStore
    publisher: Publisher
    tracker: Tracker
    problems: Problems
    codec: PromptCodec
    scoring: ScoringPool
    cluster: RayLink | None
    """None if the run uses no Ray cluster."""
    bounds: SamplingBounds
    learner: LearnerSettings
    coordinator: Coordinator
    invitations: Invitations
    started_at: float
    """Time of the run's first start, in seconds since the epoch."""
    evaluated: frozenset[int]
    """Versions whose evaluations the store held when the hub started."""
    spawned: SupervisedChild | None = None
    """The learner's process, if it was started before this object was made."""
    start: Start | None = None
    """The adapter from which the run started; None if it started from the bare base model."""

    @property
    def first_version(self) -> int:
        """Policy version from which the run started; 0 = the base model."""
        return self.start.policy_version if self.start else 0

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self.bounds.stop_ids))
