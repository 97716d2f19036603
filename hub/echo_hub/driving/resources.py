"""The opened resources of a hub: files, database, child processes and the state that was read from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from echo_hub.cluster.link import RayLink
from echo_hub.config.sections import HubConfig
from echo_hub.core.answer_groups import AnswerGroup
from echo_hub.core.coordinator import Coordinator
from echo_hub.learner.settings import LearnerSettings
from echo_hub.net.invitations import Invitations
from echo_hub.net.publisher import Publisher
from echo_hub.net.tracker import Tracker
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.run.offered_gguf import OfferedGguf
from echo_hub.run.start import Start
from echo_hub.scoring.asked import AskedGroups, GroupBounds
from echo_hub.scoring.checks import SamplingBounds
from echo_hub.scoring.pool import ScoringPool
from echo_hub.scoring.problems import Problems
from echo_hub.sessions.host import SessionHost
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
    sessions: SessionHost | None
    """Host of the sessions of the run's environments with state; None if the run has none."""
    cluster: RayLink | None
    """Link to the Ray cluster; None if the run uses no cluster."""
    bounds: SamplingBounds
    learner: LearnerSettings
    coordinator: Coordinator
    invitations: Invitations
    started_at: float
    """Time of the run's first start, in seconds since the epoch."""
    gguf: OfferedGguf | None
    """GGUF file that nodes with llama.cpp use instead of the base model; None if the hub offers none."""
    evaluated: frozenset[int]
    """Versions whose evaluations the store held when the hub started."""
    spawned: SupervisedChild | None = None
    """The learner's process, if it was started before this object was made."""
    asked: AskedGroups = field(default_factory=AskedGroups)
    """Open groups of rollouts that tenants have asked for."""
    answers: tuple[AnswerGroup, ...] = ()
    """Tenants' groups that the store held when the hub started."""
    answered: frozenset[tuple[int, int]] = frozenset()
    """(group, index) of each finished sample of the groups in `answers`."""
    start: Start | None = None
    """The adapter from which the run started; None if it started from the bare base model."""

    @property
    def first_version(self) -> int:
        """Policy version from which the run started; 0 = the base model."""
        return self.start.policy_version if self.start else 0

    @property
    def gguf_precision(self) -> str:
        """Precision that nodes report if they use the offered GGUF file; "" if the hub offers none."""
        return "" if self.gguf is None else self.gguf.precision(self.run_id)

    @property
    def group_bounds(self) -> GroupBounds:
        """Limits of completions by group."""
        return GroupBounds(self.bounds, self.asked)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(sorted(self.bounds.stop_ids))
