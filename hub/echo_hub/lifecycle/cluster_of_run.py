"""Connect a run to its Ray cluster. One connection serves all kinds of processes in the cluster."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import get_args

from echo_hub.cluster.link import RayLink
from echo_hub.cluster.parcel import Parcel, base_model
from echo_hub.config.scoring_sections import WorkerKind
from echo_hub.config.sections import HubConfig
from echo_hub.scoring.processes import parcel_of


@asynccontextmanager
async def open_cluster(
    config: HubConfig, base_dir: Path, *, logs: Path, owner: str = "", kinds: Collection[str] = get_args(WorkerKind)
) -> AsyncIterator[RayLink | None]:
    """Connect to the Ray cluster if the settings place a process of one of `kinds` there; otherwise yield None.

    Ray's actors are named after `owner`. A restarted hub with the same `owner` replaces the actors that the earlier hub
    left; "" makes a unique name. Raises ConfigError if Ray is not installed or the cluster cannot be reached.
    """
    parcels = await asyncio.to_thread(_parcels, config, base_dir, kinds)
    if not parcels:
        yield None
        return
    owner = owner or f"one-off-{secrets.token_hex(4)}"
    async with RayLink.open(config.ray, parcels, owner=owner, logs=logs) as link:
        yield link


def _parcels(config: HubConfig, base_dir: Path, kinds: Collection[str]) -> Mapping[WorkerKind, Parcel]:
    there: dict[WorkerKind, bool] = {
        "scorer": config.scoring.engine == "ray",
        "verifier": config.trust.verifier == "ray" and config.run.mode != "colocated",
        "evaluator": config.evaluation.by == "ray",
    }
    return {
        kind: parcel_of(config, base_dir)[0] if kind == "scorer" else base_model(base_dir)[0]
        for kind in there
        if there[kind] and kind in kinds
    }
