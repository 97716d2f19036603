"""Share of a device's time that the engine may use: the minimum of the schedule's level and of what keeps the device at
its targets for temperature and power.

    target_gpu_celsius = 70     the GPU is 66 °C warm: share 1.00
                                the GPU is 73 °C warm and still warms up: share 0.94, 0.88, ... until it stays at 70 °C

A target slows the engine down instead of stopping it. The limits of `manners` (`max_gpu_celsius` ...) stay in force.
Without readings the share stays for `SILENCE_S`, and then rises slowly, so that a broken sensor slows no engine down
for ever.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from echo_node.core.manners import MannersConfig, SensorReading
from echo_node.core.schedule import Schedule

LEAST_SHARE: Final = 0.05
"""Minimum share that a target sets. If the device is still too warm, the limits of `manners` stop the engine."""
_LONGEST_S: Final = 5.0
"""Maximum seconds that count between two readings: the machine may have slept."""
SILENCE_S: Final = 60.0
"""Seconds without a reading after which the sensor counts as gone. A driver may skip some readings."""
_RISE_S: Final = 300.0
"""Seconds of a rise from share 0 to share 1, after the sensor is gone."""

_HASTE: Final = 3.0
"""Weight of an error above the target, relative to one below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGains:
    """Parameters of a controller. Errors have the unit of `width`."""

    width: float
    """Width of the band below the target in which the figure may stay, in the unit of the figure, or relative to the
    target.
    """
    relative: bool
    """True: figures and `width` are relative to the target."""
    gain: float
    """Change of the share per unit of the figure's change."""
    reset_s: float
    """Seconds in which a constant error changes the share by `gain` times the error."""
    smoothing_s: float
    """Time constant of the average over the figure; 0 = no average."""
    play: float
    """Half of the change that counts as none: a sensor in whole degrees may flicker between two of them."""


CELSIUS: Final = TargetGains(width=2.0, relative=False, gain=0.03, reset_s=60.0, smoothing_s=0.0, play=0.5)
"""Stable for chips that warm by 20 to 100 °C at full load with time constants of 5 to 120 s."""
WATTS: Final = TargetGains(width=0.05, relative=True, gain=0.2, reset_s=10.0, smoothing_s=10.0, play=0.0)
"""The average covers the engine's steps and pauses, which take up to seconds."""


class TargetController:
    """Proportional-integral controller with a dead band, which holds a figure between `width` below its target and the
    target.

    Each reading changes the share by gain * (fall of the figure + error * seconds / reset_s), within [LEAST_SHARE, 1].
    So a figure that rises fast lowers the share before it reaches the target, and the bounds need no further
    anti-windup. An error above the target weighs `_HASTE` times one below it. In the band the error counts as 0: the
    share settles, although sensors report whole degrees.
    """

    def __init__(self, gains: TargetGains) -> None:
        self.share = 1.0
        self._gains = gains
        self._at = 0.0
        """Time of the last call of `read`."""
        self._silent_s = 0.0
        """Seconds since the last reading."""
        self._value: float | None = None
        """The figure, averaged and without flicker."""

    @property
    def is_silent(self) -> bool:
        """True if the sensor has reported no value for `SILENCE_S`."""
        return self._silent_s > SILENCE_S

    def read(self, figure: float | None, target: float, now: float) -> float:
        """Return the share after a reading. None (no reading) keeps the share for `SILENCE_S`, and then raises it."""
        called_s, self._at = min(now - self._at, _LONGEST_S), now
        if figure is None:
            self._silent_s += called_s
            if self.is_silent:
                self.share = min(1.0, self.share + called_s / _RISE_S)
            return self.share
        gains, before, passed_s = self._gains, self._value, min(self._silent_s + called_s, _LONGEST_S)
        self._silent_s = 0.0
        if before is None:
            self._value = figure
            return self.share
        average = before + (figure - before) * (passed_s / (gains.smoothing_s + passed_s) if passed_s else 0.0)
        self._value = min(max(before, average - gains.play), average + gains.play)
        unit = target if gains.relative else 1.0
        above, below = self._value - target, target - gains.width * unit - self._value
        error = -_HASTE * above if above > 0 else max(0.0, below)
        change = gains.gain / unit * (before - self._value + error * passed_s / gains.reset_s)
        self.share = min(1.0, max(LEAST_SHARE, self.share + change))
        return self.share


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFigures:
    """Sensor values of one device; None = the machine does not report the value."""

    celsius: float | None = None
    watts: float | None = None

    @classmethod
    def of(cls, reading: SensorReading, *, on_gpu: bool) -> DeviceFigures:
        if on_gpu:
            return cls(celsius=reading.gpu_celsius, watts=reading.gpu_watts)
        return cls(celsius=reading.cpu_celsius)


@dataclass(frozen=True, slots=True)
class Duty:
    """Share of its device's time that an engine may use, and the reason."""

    share: float = 1.0
    sentence: str = ""
    """Such as "25 % of the GPU's time until 22:00, because of the schedule"; empty = no limit."""


class DutyRules:
    """Computes the share of each device. Devices have names such as "cpu" and "cuda:0". Call `duty` once a second with
    the time of a monotonic clock.
    """

    def __init__(self, settings: MannersConfig) -> None:
        self._controllers: dict[tuple[str, str], TargetController] = {}
        """By device and unit of the target."""
        self.settings = settings

    @property
    def settings(self) -> MannersConfig:
        return self._settings

    @settings.setter
    def settings(self, settings: MannersConfig) -> None:
        self._settings, self._schedule = settings, Schedule.parse(settings.schedule)

    def duty(self, device: str, figures: DeviceFigures, *, now: float, local: datetime) -> Duty:
        """Return the share in hundredths, and the reason for the strictest limit."""
        what = "processor" if device == "cpu" else "GPU"
        until, level = self._schedule.until(local), self._schedule.level(local)
        # Level 0 is a hold of `manners`, not a share.
        found = [(level or 1.0, f"{f'until {until}, ' if until else ''}because of the schedule")]
        settings = self._settings
        celsius = settings.target_cpu_celsius if device == "cpu" else settings.target_gpu_celsius
        watts = 0.0 if device == "cpu" else settings.target_gpu_watts
        for unit, gains, target, figure in (
            ("°C", CELSIUS, celsius, figures.celsius),
            ("W", WATTS, watts, figures.watts),
        ):
            if not target:
                self._controllers.pop((device, unit), None)
                continue
            controller = self._controllers.setdefault((device, unit), TargetController(gains))
            share = controller.read(figure, target, now)
            measured = "" if figure is None else f", now {figure:.0f} {unit}"
            gone = "; the sensor is gone, so the share rises slowly" if controller.is_silent else ""
            found.append((share, f"to stay at {target:.0f} {unit}{measured}{gone}"))
        share, why = min(found, key=lambda one: one[0])
        share = round(share, 2)
        return Duty() if share >= 1 else Duty(share, f"{share:.0%} of the {what}'s time {why}".replace("%", " %", 1))
