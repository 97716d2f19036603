"""What a hub is made of that has to be opened before it, and closed behind it."""

from __future__ import annotations

from dataclasses import dataclass

from echo_hub.cluster.link import RayLink
from echo_hub.core.coordinator import Coordinator
from echo_hub.intake.partials import Partials
from echo_hub.learner.settings import LearnerSettings
from echo_hub.net.invitations import Invitations
from echo_hub.net.publisher import Publisher
from echo_hub.net.tracker import Tracker
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.start import Start
from echo_hub.scoring.checks import SamplingBounds
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.store.async_store import AsyncStore
from echo_shared.identity import Identity
from echo_shared.supervised import SupervisedChild


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What `echo_hub.serving.opening.open_hub` has opened, and closes again."""

    me: Identity
    run_id: str
    store: AsyncStore
    publisher: Publisher
    tracker: Tracker
    problems: Problems
    codec: PromptCodec
    scoring: ScoringPool
    cluster: RayLink | None
    """None: nothing runs there."""
    bounds: SamplingBounds
    learner: LearnerSettings
    coordinator: Coordinator
    partials: Partials
    invitations: Invitations
    started_at: float
    """When the run was served for the first time."""
    evaluated: frozenset[int]
    """Versions whose accuracy is in the store."""
    spawned: SupervisedChild | None = None
    """The learner's process, if it was begun before the hub."""
    start: Start | None = None
    """What the run began with; None: the bare base."""
