"""A few of the attacks, on a real hub and a real node; and what is said of one that goes through."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.progress import Progress
from benchmarks.trust import attacking, headline
from benchmarks.trust.protocol import Unnoticed

pytestmark = pytest.mark.timeout(900)

ON_HUB = ("protocol, captured handshake", "protocol, nested frames", "protocol, a version that was not leased")
ON_NODE = ("on a node, unsigned manifest", "on a node, adapter of NaN")


@pytest.mark.slow
def test_attacks_are_noticed_and_the_hub_goes_on(tmp_path: Path) -> None:
    progress = Progress(attacking.plan(), [*ON_HUB, *ON_NODE])
    rows = {row["case"]: row for row in attacking.measure(tmp_path, progress, seed=0)}
    assert rows.keys() == {*ON_HUB, *ON_NODE}
    assert {case: row["how"] for case, row in rows.items() if not row["detected"]} == {}
    assert all(rows[case]["stall_s"] > 0 for case in ON_HUB), "somebody has looked"
    found = headline(list(rows.values()))
    assert (found["attacks_tried"], found["attacks_detected"]) == (5, 5) and found["stall_s_worst"] > 0


def test_what_goes_through_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    async def goes_through() -> str:
        raise Unnoticed("it is still there")

    assert attacking._verdict(goes_through()) == {"detected": False, "how": "it is still there"}
    monkeypatch.setattr(attacking, "ENDS_WITHIN_S", 0.0)

    async def never_ends() -> str:
        await attacking.asyncio.Event().wait()
        return ""

    assert attacking._verdict(never_ends()) == {"detected": False, "how": "nothing for 0 s"}
