from __future__ import annotations

import asyncio
from typing import Any

from benchmarks.trust.loads import Unnoticed, headline, verdict


async def goes_through(site: Any) -> str:
    raise Unnoticed("it is still there")


async def never_ends(site: Any) -> str:
    await asyncio.Event().wait()
    return ""


def test_an_attack_that_goes_through_is_not_detected() -> None:
    site: Any = None
    assert verdict(site, goes_through) == {"detected": False, "how": "it is still there"}
    assert verdict(site, never_ends, within_s=0.0) == {"detected": False, "how": "nothing for 0 s"}


def test_the_headline_has_the_worst_of_all_attacks() -> None:
    found = headline([{"stall_s": 0.2, "log_kb": 9.0}, {"stall_s": 0.1, "rss_growth_mb": 3.0, "log_kb": 10.0}])
    assert found == {"stall_s_worst": 0.2, "rss_growth_mb_worst": 3.0, "log_kb_worst": 10.0}
