"""Preparation and opening of groups (the rollouts of one problem). A group is *admitted* once its rollouts would be
fresh enough for their step (staleness bound), *prepared* once its problem is tokenised, and then opened in order of
id. A group whose episodes are sessions is opened only while there are slots for them (`session_slots`)."""

from __future__ import annotations

from echo_hub.core.accounting.effects import PrepareGroup
from echo_hub.core.accounting.events import GroupPrepared
from echo_hub.core.accounting.ledger import Ledger
from echo_hub.core.accounting.outbox import Outbox
from echo_hub.core.policy.session_slots import SessionSlots
from echo_hub.core.policy.sizing import room
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.core.training import Training


class Admitting:
    """Decides how many groups are opened for the learner, and requests their problems. No group is opened while an
    operator has set leasing to paused or draining."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        *,
        training: Training,
        ledger: Ledger,
        slots: SessionSlots,
        out: Outbox,
        next_group_id: int,
    ) -> None:
        self.outlook = training.outlook
        """Expected groups of the coming steps, as computed when `advance` last admitted groups."""
        self._settings = settings
        self._training = training
        self._ledger = ledger
        self._slots = slots
        self._out = out
        self._next_to_open = next_group_id
        self._next_to_admit = next_group_id
        """Lowest group id that is not admitted yet."""
        self._next_to_prepare = next_group_id
        self._prepared: dict[int, GroupPrepared] = {}
        self._stood: tuple[int, ...] = ()
        """Version and counters when `advance` last admitted groups. While they stay equal, no further group can be
        admitted."""

    @property
    def num_preparing(self) -> int:
        """Return the number of admitted groups whose problem is still being prepared."""
        return self._next_to_admit - self._next_to_open

    def advance(self, version: int) -> None:
        """Admit and open as many groups as may be sampled with `version` under the staleness bound.

        In co-located and sequential mode nodes idle until the next version is published, so the problems of the next
        step are prepared ahead.
        """
        standing = (version, self._training.trained_steps, self._ledger.num_queue_changes)
        if standing != self._stood and self._settings.leasing == "open":
            self._stood = standing
            self.outlook = self._training.outlook
            waiting = len(self._ledger.waiting) + self.num_preparing
            self._next_to_admit += room(self._settings, self.outlook, lease_version=version, waiting_groups=waiting)
            self._prepare()
            self.open_prepared()

    def prepared(self, event: GroupPrepared) -> None:
        """Store the problem of a group that was requested by PrepareGroup; ignore any other."""
        if self._next_to_open <= event.group_id < self._next_to_prepare:
            self._prepared[event.group_id] = event
            self.open_prepared()

    def open_prepared(self) -> None:
        """Open admitted groups in id order, whatever the order of preparation, so that a restart knows the next id."""
        while self._next_to_open < self._next_to_admit and self._settings.leasing == "open" and not self._lacks_slots:
            prepared = self._prepared.pop(self._next_to_open, None)
            if prepared is None:
                return
            self._next_to_open += 1
            if self._training.passes_over(prepared):
                self._next_to_admit += 1
                self._prepare()
            else:
                self._training.open_group(prepared)

    @property
    def waits_for_slots(self) -> bool:
        """True if the next group is admitted and prepared, but too few slots for its sessions are free."""
        return self._next_to_open < self._next_to_admit and self._next_to_open in self._prepared and self._lacks_slots

    @property
    def _lacks_slots(self) -> bool:
        if self._settings.session_of(self._next_to_open) is None:
            return False
        return not self._slots.fits(self._training, self._settings.group_size)

    def change(self, settings: CoordinatorSettings) -> None:
        """Apply new settings. Groups that are admitted but not open are admitted again under the new settings."""
        self._settings, self._stood = settings, ()
        self._next_to_admit = self._next_to_open

    def _prepare(self) -> None:
        """Request the problems of admitted groups and, in co-located and sequential mode, also those of the next
        step."""
        ahead = self._settings.mode != "async" and self._training.next_step < self._settings.steps
        end = self._next_to_admit + (self.outlook.next_batch if ahead else 0)
        for group_id in range(self._next_to_prepare, end):
            self._out.act(PrepareGroup(group_id=group_id))
        self._next_to_prepare = max(self._next_to_prepare, end)
