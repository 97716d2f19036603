"""What is told of one GPU, or of all of them together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuReading:
    """None = the driver does not say."""

    others: float | None = None
    """Share of the GPU's time that other processes took since the last look."""
    celsius: float | None = None
    watts: float | None = None


def together(readings: Collection[GpuReading]) -> GpuReading:
    """Of the busiest, the warmest and the hungriest."""
    return GpuReading(
        others=max((one.others for one in readings if one.others is not None), default=None),
        celsius=max((one.celsius for one in readings if one.celsius is not None), default=None),
        watts=max((one.watts for one in readings if one.watts is not None), default=None),
    )
