"""Groups until they are opened: how many may be, whose problems are asked for, and in which order they open."""

from __future__ import annotations

from echo_hub.core.admission import room
from echo_hub.core.effects import PrepareGroup
from echo_hub.core.events import GroupPrepared
from echo_hub.core.ledger import Ledger
from echo_hub.core.outbox import Outbox
from echo_hub.core.settings import CoordinatorSettings
from echo_hub.core.training import Training


class Admitting:
    """Of the learner's groups. Opens nothing while operators have stopped that."""

    def __init__(
        self, settings: CoordinatorSettings, *, training: Training, ledger: Ledger, out: Outbox, next_group_id: int
    ) -> None:
        self.outlook = training.outlook
        """As it was when groups were last asked for."""
        self._settings = settings
        self._training = training
        self._ledger = ledger
        self._out = out
        self._next_to_open = next_group_id
        self._next_to_admit = next_group_id
        """The first group that may not be opened yet."""
        self._next_to_prepare = next_group_id
        self._prepared: dict[int, GroupPrepared] = {}
        self._stood: tuple[int, ...] = ()
        """Where things stood when groups were last asked for."""

    @property
    def num_preparing(self) -> int:
        """Groups that may be opened once their problem is there."""
        return self._next_to_admit - self._next_to_open

    def advance(self, version: int) -> None:
        """Opens what the staleness bound allows of groups that `version` samples. In lock-step modes, where the nodes
        have nothing to do until a version is published, the groups of the step after it are prepared before."""
        standing = (version, self._training.trained_steps, self._ledger.num_queue_changes)
        if standing != self._stood and self._settings.leasing == "open":
            self._stood = standing
            self.outlook = self._training.outlook
            waiting = len(self._ledger.waiting) + self.num_preparing
            self._next_to_admit += room(self._settings, self.outlook, lease_version=version, waiting_groups=waiting)
            self._prepare()
            self.open_prepared()

    def prepared(self, event: GroupPrepared) -> None:
        """A problem that was asked for is there; any other is not taken."""
        if self._next_to_open <= event.group_id < self._next_to_prepare:
            self._prepared[event.group_id] = event
            self.open_prepared()

    def open_prepared(self) -> None:
        """Opens what is admitted, in order, whatever order it is prepared in: so a restart knows which is next."""
        while self._next_to_open < self._next_to_admit and self._settings.leasing == "open":
            prepared = self._prepared.pop(self._next_to_open, None)
            if prepared is None:
                return
            self._next_to_open += 1
            if self._training.passes_over(prepared):
                self._next_to_admit += 1
                self._prepare()
            else:
                self._training.open_group(prepared)

    def change(self, settings: CoordinatorSettings) -> None:
        """What is not open yet may be opened as far as the new settings allow."""
        self._settings, self._stood = settings, ()
        self._next_to_admit = self._next_to_open

    def _prepare(self) -> None:
        """Asks for the problems of what may be opened, and of the step after it."""
        ahead = self._settings.mode != "async" and self._training.next_step < self._settings.steps
        end = self._next_to_admit + (self.outlook.next_batch if ahead else 0)
        for group_id in range(self._next_to_prepare, end):
            self._out.act(PrepareGroup(group_id=group_id))
        self._next_to_prepare = max(self._next_to_prepare, end)
