"""Rules for single devices of a node with several: the owner's pause of one device, and the load by other programs,
temperature and power of one GPU. All other rules concern the whole node (`manners`).
"""

from __future__ import annotations

from datetime import datetime

from echo_node.core.manners import (
    GpuFigures,
    Hold,
    HoldReason,
    Manners,
    MannersConfig,
    OwnerPause,
    SensorReading,
)


class DeviceManners:
    """The rules of `Manners` that concern one GPU, with their state for each device."""

    def __init__(self, settings: MannersConfig) -> None:
        self._settings = settings
        self._by_device: dict[str, Manners] = {}

    def use(self, settings: MannersConfig) -> None:
        self._settings = settings
        for manners in self._by_device.values():
            manners.settings = _of_one(settings)

    def holds(
        self, device: str, figures: GpuFigures, *, pause: OwnerPause | None, now: float, local: datetime
    ) -> tuple[Hold, ...]:
        """Return the holds (reasons to pause) of one device. For `now` and `local` see `Manners.holds`."""
        manners = self._by_device.setdefault(device, Manners(_of_one(self._settings)))
        reading = SensorReading(others_gpu=figures.others, gpu_celsius=figures.celsius, gpu_watts=figures.watts)
        found = manners.holds(reading, pause=None, on_gpu=True, now=now, local=local)
        named = [Hold(hold.reason, f"{device}: {hold.sentence}", hold.frees_memory) for hold in found]
        if pause is not None and (pause.until is None or local.timestamp() < pause.until):
            end = None if pause.until is None else datetime.fromtimestamp(pause.until, local.tzinfo)
            until = "" if end is None else f" until {end:%a %H:%M}"
            resume = f"echo-node resume --device {device}"
            named.insert(0, Hold(HoldReason.PAUSED, f"You have paused {device}{until}. Resume it with: {resume}"))
        return tuple(named)


def _of_one(settings: MannersConfig) -> MannersConfig:
    """Return the settings without the working hours, which concern the whole node."""
    return settings.model_copy(update={"schedule": ()})
