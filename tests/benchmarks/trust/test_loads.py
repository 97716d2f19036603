from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.trust.loads import Unnoticed, Victim, verdict


async def goes_through(victim: Victim) -> str:
    raise Unnoticed("it is still there")


async def never_ends(victim: Victim) -> str:
    await asyncio.Event().wait()
    return ""


def test_an_attack_that_goes_through_is_not_detected() -> None:
    victim: Any = None
    assert verdict(victim, goes_through) == {"detected": False, "how": "it is still there"}
    assert verdict(victim, never_ends, within_s=0.0) == {"detected": False, "how": "nothing for 0 s"}
