from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from benchmarks.trust import protocol
from benchmarks.trust.protocol import HONEST_WITHIN_S, Unnoticed
from benchmarks.trust.site import Site
from echo_hub.core.effects import GroupOpened, RolloutsLeased
from echo_hub.run.directory import RunDirectory
from echo_hub.store.store import Store


def test_what_is_held_is_within_its_deadline(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    run = RunDirectory(tmp_path)
    site = Site(url="", run=run, scratch=tmp_path, processes=ExitStack(), hub=None, bystander=None)

    def leased(lease_id: int, *indices: int, node_id: str, deadline: float) -> RolloutsLeased:
        return RolloutsLeased(
            lease_id=lease_id, node_id=node_id, group_id=0, indices=indices, policy_version=0, deadline=deadline
        )

    assert protocol._held(site) == {}
    store.apply([GroupOpened(group_id=0, seed=1), leased(1, 0, 1, 2, node_id="late", deadline=10.0)], now=5.0)
    store.apply([leased(2, 3, 4, node_id="punctual", deadline=20.0)], now=6.0)
    assert protocol._held(site) == {"late": 3, "punctual": 2}
    store.apply([leased(3, 5, node_id="late", deadline=30.0)], now=11.0)
    assert protocol._held(site) == {"late": 1, "punctual": 2}, "what is overdue is the hub's again"


def test_fresh_keys_may_have_no_more_than_strangers_and_keep_nobody_out() -> None:
    joined = Counter(joined=2_000)
    noticed = protocol._stormed(joined, held=32, quota=32, honest_s=0.2)
    assert noticed.figures == {"held_at_once": 32, "honest_joined_s": 0.2}
    with pytest.raises(Unnoticed, match="33 rollouts at once"):
        protocol._stormed(joined, held=33, quota=32, honest_s=0.2)
    with pytest.raises(Unnoticed, match="joined after"):
        protocol._stormed(joined, held=32, quota=32, honest_s=HONEST_WITHIN_S + 0.1)
