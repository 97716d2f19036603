"""Rules for using the owner's machine: they turn sensor readings and the time into holds. A hold is a reason to pause,
explained by one sentence.

A hold begins with the first reading that calls for it. A hold from a measured figure ends only after the figure was
well within its limit for CALM_S seconds, so that the node does not stop and start in quick alternation. Values that the
machine does not report (None) cause no hold.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Final, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from echo_node.core.schedule import Schedule
from echo_node.core.traffic import Caps, Traffic
from echo_shared.described import Described
from echo_shared.errors import ConfigError

CALM_S: Final = 10.0
"""Seconds for which a measured figure must stay well within its limit before the hold (reason to pause) that it caused
ends.
"""
COOLER: Final = 8.0
"""Degrees Celsius below the limit at which a chip counts as cool again."""
_GB: Final = 1e9

Share = Annotated[float, Field(ge=0, le=1)]
Celsius = Annotated[float, Field(ge=0, le=150)]


class MannersConfig(Described):
    """Conditions under which the node leaves the machine to its owner."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    gpu: Literal["idle", "always"] = "idle"
    """idle: use the GPU only while its owner is away; a machine without a desktop counts as idle. always: use it at all
    times.
    """
    cpu: Literal["idle", "always"] = "always"
    """For an engine on the processor. idle: use the processor only while its owner is away; always: use it at all
    times.
    """
    idle_after_s: Annotated[float, Field(ge=0, le=86_400)] = 180.0
    """Seconds without keyboard and mouse after which the owner counts as away."""
    on_battery: bool = False
    """Work while the machine runs on its battery."""
    schedule: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    """Working hours in local time, such as "mon-fri 22:00-07:00"; empty = at all times. A level at the end, such as in
    "07:00-22:00 25%", limits the engine to a share of its device's time (processor cores or GPU). If several lines
    cover a moment, the last line counts.
    """
    exclusive: Annotated[tuple[str, ...], Field(max_length=64)] = ()
    """Programs that stop the node while they run, by file name, such as "blender"."""
    full_screen: bool = False
    """Work while a game or another program fills the screen, as far as the system tells."""
    others_gpu: Share = 0.25
    """Share of the GPU that other programs may use before the node stops using it; 1 = all of it."""
    others_cpu: Share = 1.0
    """Share of the processor that other programs, except those of low priority, may use before the node stops using it.
    1 = no limit: the node's own low priority suffices.
    """
    priority: Literal["lowest", "low", "normal"] = "lowest"
    """Priority of the engine among this machine's programs, for processor and disk."""
    cpu_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the processor's cores for the engine, unless `threads` is set; at least one core."""
    max_cpu_celsius: Celsius = 95.0
    """Highest temperature of the processor, if the system reports it; 0 = no limit."""
    max_gpu_celsius: Celsius = 87.0
    """Highest temperature of the GPU; 0 = no limit."""
    max_gpu_watts: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    """Highest power of the GPU, averaged over some seconds; 0 = no limit."""
    target_cpu_celsius: Celsius = 0.0
    """Temperature at which to hold the processor: an engine on the processor slows down, without stopping; 0 = none."""
    target_gpu_celsius: Celsius = 0.0
    """Temperature at which to hold the GPU: an engine on the GPU slows down, without stopping; 0 = none."""
    target_gpu_watts: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    """Power at which to hold the GPU: an engine on the GPU slows down, without stopping; 0 = none."""
    min_free_memory_bytes: Annotated[int, Field(ge=0)] = 512 * 2**20
    """Memory to leave for other programs."""
    min_free_disk_bytes: Annotated[int, Field(ge=0)] = 256 * 2**20
    """Space to leave on the disk with the node's files."""
    metered: bool = False
    """Work on a network that is paid for by use, as NetworkManager reports it."""
    max_upload_bytes_day: Annotated[int, Field(ge=0)] = 0
    """Maximum bytes to send in a day of the local calendar; 0 = no limit. At the limit, the node delivers its finished
    rollouts, and stays off the network until the next day.
    """
    max_upload_bytes_month: Annotated[int, Field(ge=0)] = 0
    """Maximum bytes to send in a calendar month; 0 = no limit."""
    max_download_bytes_day: Annotated[int, Field(ge=0)] = 0
    """Maximum bytes to receive in a day; 0 = no limit."""
    max_download_bytes_month: Annotated[int, Field(ge=0)] = 0
    """Maximum bytes to receive in a calendar month; 0 = no limit."""
    keep_memory_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """Seconds for which a paused engine keeps its model in memory, to resume at once; games get the memory
    immediately.
    """
    keep_awake: bool = False
    """Keep the machine from falling asleep by itself while the node works on mains power. The screen still turns
    off, and the owner can still send the machine to sleep.
    """

    @property
    def caps(self) -> Caps:
        """Limits on the bytes that the node sends and receives, by day and by month."""
        return Caps(
            sent_a_day=self.max_upload_bytes_day,
            sent_a_month=self.max_upload_bytes_month,
            received_a_day=self.max_download_bytes_day,
            received_a_month=self.max_download_bytes_month,
        )

    @model_validator(mode="after")
    def _check_schedule(self) -> Self:
        Schedule.parse(self.schedule)
        return self

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        """Raise ConfigError if a limit would stop the engine before it reaches the target."""
        for quantity in ("cpu_celsius", "gpu_celsius", "gpu_watts"):
            target, limit = getattr(self, f"target_{quantity}"), getattr(self, f"max_{quantity}")
            if target and limit and target >= limit:
                raise ConfigError(
                    f"manners.target_{quantity} must be below manners.max_{quantity}, which stops the engine.",
                    got=f"target {target:g}, limit {limit:g}",
                    do=f"Lower the target, or raise max_{quantity}; 0 = no limit.",
                )
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    """Sensor values of one GPU; None = its driver does not report the value."""

    others: float | None = None
    """Share of the GPU that programs besides this user's Echo processes use."""
    celsius: float | None = None
    watts: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SensorReading:
    """Sensor values at one moment; None = this machine does not report the value."""

    idle_s: float | None = None
    """Seconds since the owner's last input; inf = no desktop is in use."""
    on_battery: bool | None = None
    battery_share: float | None = None
    """Charge of the battery, from 0 to 1."""
    programs: frozenset[str] = frozenset()
    """Running programs that `MannersConfig.exclusive` names."""
    full_screen: bool | None = None
    others_cpu: float | None = None
    """Share of all cores that other programs use, except programs of low priority."""
    others_gpu: float | None = None
    """Share of the GPU that programs besides this user's Echo processes use."""
    hub_gpu: float | None = None
    """Share of the GPU that this user's own hub uses, with its learner. It pauses nothing."""
    cpu_celsius: float | None = None
    gpu_celsius: float | None = None
    gpu_watts: float | None = None
    gpus: Mapping[str, GpuFigures] = field(default_factory=dict)
    """Values of each GPU that has an id, by this id. The values above are the maxima over all GPUs."""
    free_memory_bytes: int | None = None
    engine_bytes: int = 0
    """Bytes that the engine will use after its next start; 0 = the engine runs already, or its size is unknown."""
    free_disk_bytes: int | None = None
    metered: bool | None = None
    traffic: Traffic | None = None
    """Bytes that the node itself has sent and received."""


@dataclass(frozen=True, slots=True)
class OwnerPause:
    """A pause that the owner has ordered."""

    until: float | None = None
    """End in seconds since the epoch; None = until the owner resumes the node."""


class HoldReason(StrEnum):
    """Reason of a hold, that is, why the node pauses. The values are stable, for programs that read `echo-node status
    --json`.
    """

    PAUSED = "paused"
    SCHEDULE = "schedule"
    ON_BATTERY = "on_battery"
    OWNER_ACTIVE = "owner_active"
    APPLICATION = "application"
    FULL_SCREEN = "full_screen"
    OTHERS_GPU = "others_gpu"
    OTHERS_CPU = "others_cpu"
    CPU_HOT = "cpu_hot"
    GPU_HOT = "gpu_hot"
    GPU_POWER = "gpu_power"
    MEMORY = "memory"
    DISK = "disk"
    METERED = "metered"
    TRAFFIC = "traffic"


@dataclass(frozen=True, slots=True)
class Hold:
    """One reason for the node to pause."""

    reason: HoldReason
    sentence: str
    frees_memory: bool = False
    """True if the engine's memory must be freed at once."""

    @property
    def keeps_offline(self) -> bool:
        """True if this hold (reason to pause) also forbids the use of the network."""
        return self.reason in (HoldReason.METERED, HoldReason.TRAFFIC)


FREES_MEMORY: Final = frozenset(
    {HoldReason.APPLICATION, HoldReason.FULL_SCREEN, HoldReason.OTHERS_GPU, HoldReason.MEMORY}
)


@dataclass(frozen=True, slots=True)
class _Finding:
    """Result of one rule. `begins`: the figure exceeds its limit, which starts a hold (a reason to pause). `lasts`: the
    figure is not yet far enough within its limit to end a hold.
    """

    reason: HoldReason
    begins: bool
    lasts: bool
    sentence: str


class Manners:
    """Applies the owner's rules for pausing the node, and keeps their state. Call `holds` regularly, with the time of a
    monotonic clock.
    """

    def __init__(self, settings: MannersConfig) -> None:
        self._settings = settings
        self._schedule = Schedule.parse(settings.schedule)
        self._held_since: dict[HoldReason, float] = {}
        """Time of the last reading that called for a hold (reason to pause), by reason."""

    @property
    def settings(self) -> MannersConfig:
        return self._settings

    @settings.setter
    def settings(self, settings: MannersConfig) -> None:
        self._settings, self._schedule = settings, Schedule.parse(settings.schedule)

    def holds(
        self, reading: SensorReading, *, pause: OwnerPause | None, on_gpu: bool, now: float, local: datetime
    ) -> tuple[Hold, ...]:
        """Return the current holds (reasons to pause), the owner's own orders first; empty = the node may work.

        `local` must have a time zone.
        """
        found = [*self._owner_holds(pause, local), *self._state_holds(reading, on_gpu=on_gpu)]
        caps = self._settings.caps
        if reading.traffic is not None and (said := caps.reached(reading.traffic, local.date())) is not None:
            found.append((HoldReason.TRAFFIC, said))
        for finding in self._figure_findings(reading, on_gpu=on_gpu):
            if self._calls_for(finding, now):
                found.append((finding.reason, finding.sentence))
        return tuple(Hold(reason, sentence, reason in FREES_MEMORY) for reason, sentence in found)

    def _calls_for(self, finding: _Finding, now: float) -> bool:
        since = self._held_since.get(finding.reason)
        if finding.begins or (since is not None and finding.lasts):
            self._held_since[finding.reason] = since = now
        if since is not None and now - since >= CALM_S:
            del self._held_since[finding.reason]
            return False
        return since is not None

    def _owner_holds(self, pause: OwnerPause | None, local: datetime) -> Iterator[tuple[HoldReason, str]]:
        if pause is not None and (pause.until is None or local.timestamp() < pause.until):
            end = None if pause.until is None else datetime.fromtimestamp(pause.until, local.tzinfo)
            until = "" if end is None else f" until {end:%a %H:%M}"
            yield HoldReason.PAUSED, f"Paused by you{until}. Resume with: echo-node resume"
        if not self._schedule.level(local):
            begins = self._schedule.next_begin(local)
            yield HoldReason.SCHEDULE, f"Outside the hours that you have set; the next ones begin {begins}."

    def _state_holds(self, reading: SensorReading, *, on_gpu: bool) -> Iterator[tuple[HoldReason, str]]:
        settings = self._settings
        if reading.on_battery and not settings.on_battery:
            level = "" if reading.battery_share is None else f" ({reading.battery_share:.0%} left)"
            yield HoldReason.ON_BATTERY, f"On battery{level}."
        device, rule = ("GPU", settings.gpu) if on_gpu else ("processor", settings.cpu)
        if rule == "idle" and reading.idle_s is not None and reading.idle_s < settings.idle_after_s:
            away = f"until you have been away for {settings.idle_after_s / 60:.3g} minutes"
            yield HoldReason.OWNER_ACTIVE, f"You are using this computer: the {device} is yours {away}."
        if reading.programs:
            verb = "runs" if len(reading.programs) == 1 else "run"
            yield HoldReason.APPLICATION, f"{', '.join(sorted(reading.programs))} {verb}."
        if reading.full_screen and not settings.full_screen:
            yield HoldReason.FULL_SCREEN, "A game or another program fills the screen."
        if reading.metered and not settings.metered:
            yield HoldReason.METERED, "The network is metered."

    def _figure_findings(self, reading: SensorReading, *, on_gpu: bool) -> Iterator[_Finding]:
        settings = self._settings
        if on_gpu:
            yield _too_busy(HoldReason.OTHERS_GPU, "GPU", reading.others_gpu, settings.others_gpu)
            yield _too_hot(HoldReason.GPU_HOT, "GPU", reading.gpu_celsius, settings.max_gpu_celsius)
            yield _too_much_power(reading.gpu_watts, settings.max_gpu_watts)
        yield _too_busy(HoldReason.OTHERS_CPU, "processor", reading.others_cpu, settings.others_cpu)
        yield _too_hot(HoldReason.CPU_HOT, "processor", reading.cpu_celsius, settings.max_cpu_celsius)
        memory, disk = settings.min_free_memory_bytes, settings.min_free_disk_bytes
        yield _too_little(HoldReason.MEMORY, "memory", reading.free_memory_bytes, memory, reading.engine_bytes)
        yield _too_little(HoldReason.DISK, "the disk", reading.free_disk_bytes, disk)


def _too_busy(reason: HoldReason, device: str, share: float | None, most: float) -> _Finding:
    value, limit = (0.0 if share is None else share), (math.inf if most >= 1 else most)
    sentence = f"Other programs use {value:.0%} of the {device}; the node works only up to {most:.0%}."
    return _Finding(reason, value > limit, value > 0.8 * limit, sentence)


def _too_hot(reason: HoldReason, device: str, celsius: float | None, most: float) -> _Finding:
    value, limit = (-math.inf if celsius is None else celsius), (most or math.inf)
    sentence = f"The {device} is {value:.0f} °C warm; the limit is {limit:.0f} °C."
    return _Finding(reason, value > limit, value > limit - COOLER, sentence)


def _too_much_power(watts: float | None, most: float) -> _Finding:
    value, limit = (0.0 if watts is None else watts), (most or math.inf)
    sentence = f"The GPU draws {value:.0f} W; the limit is {limit:.0f} W."
    return _Finding(HoldReason.GPU_POWER, value > limit, value > 0.8 * limit, sentence)


def _too_little(reason: HoldReason, what: str, free_bytes: int | None, least: int, wanted: int = 0) -> _Finding:
    value = math.inf if free_bytes is None else float(free_bytes)
    sentence = f"{value / _GB:.2f} GB of {what} are free; {least / _GB:.2f} GB are left for other programs."
    return _Finding(reason, value < least, value < 1.25 * least + wanted, sentence)
