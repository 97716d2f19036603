"""The learner's side of the run: which step is next, what it consumes, and which versions are published.

    learner_version   what the learner holds; None while it is away
    trained_steps     steps in the books; a learner that holds less repeats them from the store first
    planned           the batch of step trained_steps + 1, once it is written
    training          what the learner is at work on

A step is written before it is trained and counted once: a learner that comes back with the planned step already in its
checkpoint has trained it, one that comes back without it gets the very same batch again.
"""

from __future__ import annotations

from collections.abc import Mapping

from echo_hub.core.admission import oldest_useful_version
from echo_hub.core.effects import AnnounceVersion, PublishVersion, TrainStep, VersionRecorded
from echo_hub.core.ledger import Ledger
from echo_hub.core.outbox import Outbox
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.core.snapshot import Snapshot
from echo_shared.errors import LocalProtocolError
from echo_shared.messages import DropReason


class Training:
    """Batches are planned oldest complete group first; the staleness bound is enforced at that moment."""

    def __init__(self, settings: CoordinatorSettings, snapshot: Snapshot, *, ledger: Ledger, out: Outbox) -> None:
        self._settings = settings
        self._ledger = ledger
        self._out = out
        self._replayable = set(snapshot.replayable)
        self.trained_steps = snapshot.trained_steps
        self.planned = snapshot.planned
        self.published_version = snapshot.published_version
        self._publishing = 0
        self.learner_version: int | None = None
        self.training: int | None = None

    @property
    def next_step(self) -> int:
        """The first step whose batch is not written yet."""
        return self.trained_steps + 1 + (self.planned is not None)

    @property
    def idle_version(self) -> int | None:
        """The version that the learner holds, if it is up to date and not at work."""
        idle = self.training is None and self.planned is None and self.learner_version == self.trained_steps
        return self.learner_version if idle else None

    @property
    def finished(self) -> bool:
        """The last step is trained, and the last version that is due is published."""
        steps_done = self.planned is None and self.trained_steps >= self._settings.steps
        return steps_done and self.published_version >= self._settings.newest_due_version(self.trained_steps)

    def learner_ready(self, policy_version: int, now: float) -> None:
        """Raises LocalProtocolError when checkpoint and store cannot be of one run."""
        trained_unseen = self.planned is not None and policy_version == self.trained_steps + 1
        missing = [step for step in range(policy_version + 1, self.trained_steps + 1) if step not in self._replayable]
        if missing or (policy_version > self.trained_steps and not trained_unseen):
            raise LocalProtocolError(
                "The learner's checkpoint and the hub's store do not fit together.",
                got=f"a checkpoint of version {policy_version}; the store has {self.trained_steps} trained steps"
                + (f", and the rollouts of step {missing[0]} are no longer kept" if missing else ""),
                do="Restore the run directory, checkpoints and database together, from one backup.",
            )
        if trained_unseen:
            self._count_step({}, now)
        self.learner_version, self.training = policy_version, None
        self._publish_if_due()

    def learner_lost(self) -> None:
        self.learner_version = self.training = None

    def step_done(self, step: int, metrics: Mapping[str, float], now: float) -> None:
        if step != self.training:
            raise LocalProtocolError(
                "The learner finished a step that it was not given.", got=f"step {step}, not {self.training}"
            )
        if step > self.trained_steps:
            self._count_step(metrics, now)
        self.learner_version, self.training = step, None
        self._publish_if_due()

    def version_published(self, policy_version: int, now: float) -> None:
        """An older version that comes in late is recorded, but only the newest is announced."""
        self._out.record(VersionRecorded(policy_version=policy_version, published_at=now))
        if policy_version > self.published_version:
            self.published_version = policy_version
            self._out.act(AnnounceVersion(policy_version=policy_version))

    def advance(self, now: float) -> None:
        """Gives an idle learner its next step, if there is one."""
        if self.learner_version is None or self.training is not None:
            return
        if self.learner_version < self.trained_steps:
            self._train(self.learner_version + 1)
            return
        if self.planned is None and self.trained_steps < self._settings.steps:
            self._plan(now)
        if self.planned is not None:
            self._train(self.planned.step)

    def sweep(self) -> None:
        """Drops waiting groups whose oldest rollout exceeds the bound at the next step, and leases that would."""
        oldest = oldest_useful_version(self._settings, next_step=self.next_step)
        for group_id in self._ledger.waiting.first(len(self._ledger.waiting)):
            group = self._ledger.groups[group_id]
            if group.oldest_version is not None and group.oldest_version < oldest:
                self._ledger.drop_group(group, DropReason.STALE)
            elif not group.complete:
                late = [rollout for rollout in group.still_leased if rollout.policy_version < oldest]
                self._ledger.revoke(late, DropReason.REVOKED)

    def _plan(self, now: float) -> None:
        batch = self._settings.groups_per_step
        if len(self._ledger.complete) < batch:
            return
        self.sweep()
        if len(self._ledger.complete) < batch:
            return
        self.planned = self._ledger.plan(self.trained_steps + 1, self._ledger.complete.first(batch), now)
        # The version at which the step after this one consumes is certain from here on: give up what cannot make it.
        self.sweep()

    def _train(self, step: int) -> None:
        self.training = step
        self._out.act(TrainStep(step=step))

    def _count_step(self, metrics: Mapping[str, float], now: float) -> None:
        assert self.planned is not None
        self._ledger.train(self.planned, metrics, now)
        self.trained_steps, self.planned = self.planned.step, None
        self._replayable.add(self.trained_steps)

    def _publish_if_due(self) -> None:
        assert self.learner_version is not None
        due = self._settings.newest_due_version(self.learner_version)
        if due > max(self.published_version, self._publishing):
            self._publishing = due
            self._out.act(PublishVersion(policy_version=due))
