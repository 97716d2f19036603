"""The same run without blows."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks.chaos.books import newest_evaluation
from benchmarks.chaos.scene import awaited, scene
from benchmarks.chaos.wire import Wire
from benchmarks.harness.site import free_port

A_STEP_S: Final = 30.0
"""More seconds than an undisturbed step takes."""


async def accuracy(scratch: Path, *, seed: int, policy_version: int) -> float:
    """Held-out accuracy of a version of the undisturbed run. Raises TimeoutError."""
    port = free_port()
    async with scene(scratch, Wire(port, random.Random(seed)), port, seed=seed) as there:
        look = partial(newest_evaluation, there.engine, of_version=policy_version)
        found = await awaited(look, within_s=A_STEP_S * max(1, policy_version))
    if found is None:
        raise TimeoutError(
            f"version {policy_version} is not evaluated: see {(scratch / 'hub.log').read_text()[-2000:]}"
        )
    return found[1]
