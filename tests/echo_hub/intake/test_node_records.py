from __future__ import annotations

from pathlib import Path

import pytest

from echo_hub.intake.node_records import change_own_team
from echo_hub.store.store import Store
from echo_shared.errors import RefusedError
from echo_shared.wire.messages import Team, TeamWanted
from tests.echo_hub.store.conftest import Records


async def test_a_team_is_made_shown_and_left(tmp_path: Path) -> None:
    store = Store.open(f"sqlite:///{tmp_path / 'echo.db'}")
    store.node_seen(node_id="a", public_key=bytes(32), name="ada", backend="torch", device="d", now=1.0)
    with pytest.raises(RefusedError, match="Nothing of this node's work"):
        await change_own_team(store, "a", TeamWanted(action="create", name="Herons"))
    store.apply(Records.one_step(1, lease_id=1, group_id=0, node_id="a"), now=1.0)
    made = await change_own_team(store, "a", TeamWanted(action="create", name="Herons"))
    assert (made.name, made.members) == ("Herons", 1)
    assert await change_own_team(store, "a", TeamWanted(action="show")) == made
    assert await change_own_team(store, "a", TeamWanted(action="leave")) == Team()
    store.close()
