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
"""Minimum share of the device's time that a target sets. If the device is still too warm, the limits of `manners` stop
the engine.
"""
_LONGEST_S: Final = 5.0
"""Maximum seconds that count between two readings: the machine may have slept."""
SILENCE_S: Final = 60.0
"""Seconds without a reading after which the sensor counts as gone. A driver may skip some readings."""
_RISE_S: Final = 300.0
"""After the sensor is gone, the share rises slowly: in this number of seconds from 0 to 1."""

_HASTE: Final = 3.0
"""Factor by which an error above the target counts more than an error below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetGains:
    """Parameters of a controller that holds a figure (temperature or power) at its target. An error is the figure's
    distance from the band below the target.
    """

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
    """Time constant in seconds of the average that replaces the single figures; 0 = no average."""
    play: float
    """Half of the change that is ignored: a sensor in whole degrees may flicker between two values."""


CELSIUS: Final = TargetGains(width=2.0, relative=False, gain=0.03, reset_s=60.0, smoothing_s=0.0, play=0.5)
"""Gains for temperatures. They are stable for chips that warm by 20 to 100 °C at full load, with time constants of 5 to
120 s.
"""
WATTS: Final = TargetGains(width=0.05, relative=True, gain=0.2, reset_s=10.0, smoothing_s=10.0, play=0.0)
"""Gains for power. The reading is averaged over 10 s, because an engine's steps and pauses take up to seconds."""


class TargetController:
    """Proportional-integral controller with a dead band. It holds a figure (temperature or power) between `width` below
    its target and the target.

    Each reading changes the share of the device's time by gain * (fall of the figure + error * seconds / reset_s),
    within [LEAST_SHARE, 1]. So a figure that rises fast lowers the share before it reaches the target, and the bounds
    need no further anti-windup. An error above the target counts `_HASTE` times as much as one below it. In the band
    the error counts as 0: the share settles, although sensors report whole degrees.
    """

    def __init__(self, gains: TargetGains) -> None:
        self.share = 1.0
        self._gains = gains
        self._at = 0.0
        """Time of the previous call of `read`, in seconds of the monotonic clock."""
        self._silent_s = 0.0
        """Seconds since the last reading with a value."""
        self._value: float | None = None
        """The figure, averaged and without flicker."""

    @property
    def is_silent(self) -> bool:
        """True if the sensor has reported no value for `SILENCE_S`."""
        return self._silent_s > SILENCE_S

    def read(self, figure: float | None, target: float, now: float) -> float:
        """Return the share of the device's time after a reading of `figure`. None (no reading) keeps the share for
        `SILENCE_S`, and then raises it.
        """
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
    """Limit on an engine's use of its device: share of the device's time, and reason of the limit."""

    share: float = 1.0
    sentence: str = ""
    """Reason of the limit, such as "25 % of the GPU's time until 22:00, because of the schedule"; empty = no limit."""


class DutyRules:
    """Computes, for each device, the share of its time that the engine may use. Devices have names such as "cpu" and
    "cuda:0". Call `duty` once a second with the time of a monotonic clock.
    """

    def __init__(self, settings: MannersConfig) -> None:
        self._controllers: dict[tuple[str, str], TargetController] = {}
        """Controllers by device and unit of the target."""
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
        # Outside working hours the level is 0. `manners` then pauses the engine, so no share is needed.
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
