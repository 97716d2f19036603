from __future__ import annotations

from typing import Any

import pytest

from echo_hub.core.accounting.snapshot import CoordinatorSnapshot
from echo_hub.core.trust.standing import StandingRow
from tests.echo_hub.core.trust.checked_run import (
    SETTINGS,
)


@pytest.fixture
def world(bench):
    """Return a function that makes a run with groups of one rollout, in which rollouts are checked. `standings`: the
    hub's earlier verdicts on the nodes.
    """

    def make(*standings: StandingRow, **settings: Any):
        snapshot = settings.pop("snapshot", CoordinatorSnapshot(standings=standings))
        return bench(snapshot, **{"trust": SETTINGS, "group_size": 1, **settings})

    return make
