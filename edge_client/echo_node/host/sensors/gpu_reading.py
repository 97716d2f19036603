"""Readings of one GPU, or of all GPUs combined."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Readings of a GPU; None = the driver does not report the value."""

    others: float | None = None
    """Share of the GPU's time that other processes used since the previous reading."""
    hub: float | None = None
    """Share of the GPU's time that this user's own hub used, with its learner. `others` does not count it."""
    celsius: float | None = None
    watts: float | None = None
    uuid: str = ""
    """Id of the GPU; empty = its driver does not report one."""


def together(readings: Collection[GpuReading]) -> GpuReading:
    """Combine the readings of several GPUs: each value is the maximum over the GPUs."""
    return GpuReading(
        others=max((one.others for one in readings if one.others is not None), default=None),
        hub=max((one.hub for one in readings if one.hub is not None), default=None),
        celsius=max((one.celsius for one in readings if one.celsius is not None), default=None),
        watts=max((one.watts for one in readings if one.watts is not None), default=None),
    )
