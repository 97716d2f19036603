"""Changes that an operator may make during a run, as pure rules on the coordinator's settings.

    leasing             open, paused or draining
    max_staleness       applies to every batch planned from now on
    publish_every       applies from the first step without a planned batch; that step's version is published
    publish_now         publishes that version, then continues with the current interval
    learning_rate       applies from the first step without a planned batch
    objective           applies from the first step without a planned batch
    spend_cap_per_hour  applies at once

A step that the learner may already have keeps its settings, so that a learner that repeats the step after a crash
computes exactly the same. A change is refused if it would leave some step without any sufficiently fresh version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from echo_hub.core.accounting.effects import ActionSettled, SettingRecorded
from echo_hub.core.accounting.events import OperatorAsked
from echo_hub.core.settings import LEASING, CoordinatorSettings

MOST_CHANGES: Final = 1_000
"""Number of remembered changes of one setting. It suffices: after a crash a learner repeats far fewer steps."""


class LiveSetting(StrEnum):
    """Settings that operators may change during a run. The database stores them under these names."""

    LEASING = "leasing"
    MAX_STALENESS = "max_staleness"
    PUBLISH_EVERY = "publish_every"
    LEARNING_RATE = "learning_rate"
    OBJECTIVE = "objective"
    SPEND_CAP = "spend_cap_per_hour"


PUBLISH_NOW: Final = "publish_now"
"""Name of the request to publish the next version; all other requests change a setting."""


OVER: Final = (
    "The run is finished: its last step is trained. Thank you. The node may stop, or stay for as long as the hub is "
    "up. With `stay = true` in its settings it stays longer, in case the operator extends the run."
)
PAUSED: Final = "The operator has paused the run. Work resumes when the operator resumes the run."


class RefusedChange(Exception):
    """Refusal of a change, with the reason for the operator."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taken:
    """Accepted change of one setting."""

    settings: CoordinatorSettings
    setting: LiveSetting
    stored: Any
    """Stored value of the setting, JSON-compatible."""
    before: Any
    after: Any
    detail: str = ""


def answer(
    settings: CoordinatorSettings, asked: OperatorAsked, *, next_step: int, published_version: int
) -> tuple[CoordinatorSettings, tuple[SettingRecorded | ActionSettled, ...]]:
    """Return the settings after an operator's request (unchanged if it is refused), and the records to commit."""
    try:
        taken = take(settings, asked, next_step=next_step, published_version=published_version)
    except RefusedChange as error:
        return settings, (ActionSettled(number=asked.number, done=False, detail=str(error)),)
    return taken.settings, (
        SettingRecorded(setting=taken.setting, stored=taken.stored),
        ActionSettled(number=asked.number, done=True, before=taken.before, after=taken.after, detail=taken.detail),
    )


def take(settings: CoordinatorSettings, asked: OperatorAsked, *, next_step: int, published_version: int) -> Taken:
    """Apply the request to the settings. `next_step`: first step without a batch. Raises RefusedChange."""
    match asked.what:
        case LiveSetting.LEASING:
            taken = _leasing(settings, str(asked.value))
        case LiveSetting.MAX_STALENESS:
            taken = _max_staleness(settings, int(asked.value))
        case LiveSetting.PUBLISH_EVERY:
            taken = _publish_every(settings, int(asked.value), next_step)
        case LiveSetting.LEARNING_RATE:
            taken = _learning_rate(settings, float(asked.value), next_step)
        case LiveSetting.OBJECTIVE:
            taken = _objective(settings, str(asked.value), next_step)
        case LiveSetting.SPEND_CAP:
            taken = _spend_cap(settings, float(asked.value))
        case "publish_now":
            taken = _publish_now(settings, next_step)
        case _:
            raise RefusedChange(f"The coordinator knows no setting {asked.what!r}.")
    if taken.setting in (LiveSetting.MAX_STALENESS, LiveSetting.PUBLISH_EVERY):
        _check_fresh(taken.settings, next_step=next_step, published_version=published_version)
    return taken


def restored(settings: CoordinatorSettings, stored: Mapping[str, Any]) -> CoordinatorSettings:
    """Return `settings` with the operators' changes that the database has stored."""
    changes: dict[str, Any] = {}
    for name, value in stored.items():
        match LiveSetting(name):
            case LiveSetting.LEASING:
                changes["leasing"] = value
            case LiveSetting.MAX_STALENESS:
                changes["max_staleness"] = value
            case LiveSetting.PUBLISH_EVERY:
                changes["publish_changes"] = tuple((first, every) for first, every in value)
            case LiveSetting.LEARNING_RATE:
                changes["learning_rates"] = tuple((first, rate) for first, rate in value)
            case LiveSetting.OBJECTIVE:
                changes["objectives"] = tuple((first, objective) for first, objective in value)
            case LiveSetting.SPEND_CAP:
                changes["activation"] = replace(settings.activation, spend_cap_per_hour=value)
    return replace(settings, **changes)


def _leasing(settings: CoordinatorSettings, state: str) -> Taken:
    if state not in LEASING:
        raise RefusedChange(f"Leasing is one of {', '.join(LEASING)}, not {state!r}.")
    if state == settings.leasing:
        raise RefusedChange(f"Leasing is {state} already.")
    changed = replace(settings, leasing=state)
    return Taken(settings=changed, setting=LiveSetting.LEASING, stored=state, before=settings.leasing, after=state)


def _max_staleness(settings: CoordinatorSettings, bound: int) -> Taken:
    if settings.mode != "async":
        raise RefusedChange(f"In {settings.mode} mode the staleness bound is 0.")
    if settings.interval > bound + 1:
        raise RefusedChange(
            f"A version is published every {settings.interval} steps. With a bound of {bound} no version would be "
            f"fresh enough. Publish every {bound + 1} steps or more often first."
        )
    return Taken(
        settings=replace(settings, max_staleness=bound),
        setting=LiveSetting.MAX_STALENESS,
        stored=bound,
        before=settings.max_staleness,
        after=bound,
    )


def _publish_every(settings: CoordinatorSettings, every: int, next_step: int) -> Taken:
    if settings.mode == "sequential":
        raise RefusedChange("In sequential mode every version is published: each step samples with the newest one.")
    if settings.mode == "async" and every > settings.max_staleness + 1:
        raise RefusedChange(
            f"The staleness bound is {settings.max_staleness}: a version must be published every "
            f"{settings.max_staleness + 1} steps or more often. Raise the bound first."
        )
    return _republished(settings, every, next_step)


def _publish_now(settings: CoordinatorSettings, next_step: int) -> Taken:
    if next_step >= settings.steps:
        raise RefusedChange("The run's last version is published in any case.")
    if settings.is_due(next_step):
        raise RefusedChange(f"Version {next_step}, the next possible one, is published in any case.")
    return _republished(settings, settings.interval, next_step)


def _republished(settings: CoordinatorSettings, every: int, next_step: int) -> Taken:
    changes = (*(one for one in settings.publish_changes if one[0] < next_step), (next_step, every))[-MOST_CHANGES:]
    return Taken(
        settings=replace(settings, publish_changes=changes),
        setting=LiveSetting.PUBLISH_EVERY,
        stored=[list(change) for change in changes],
        before=settings.interval,
        after=every,
    )


def _learning_rate(settings: CoordinatorSettings, rate: float, next_step: int) -> Taken:
    rates = (*(one for one in settings.learning_rates if one[0] < next_step), (next_step, rate))[-MOST_CHANGES:]
    return Taken(
        settings=replace(settings, learning_rates=rates),
        setting=LiveSetting.LEARNING_RATE,
        stored=[list(change) for change in rates],
        before=settings.learning_rate_of(next_step),
        after=rate,
    )


def _objective(settings: CoordinatorSettings, wanted: str, next_step: int) -> Taken:
    if settings.change_objective is None:
        raise RefusedChange("The objective of this run does not change.")
    try:
        changed, before, after = settings.change_objective(settings.objective_of(next_step), wanted)
    except ValueError as error:
        raise RefusedChange(str(error)) from None
    objectives = (*(one for one in settings.objectives if one[0] < next_step), (next_step, changed))[-MOST_CHANGES:]
    return Taken(
        settings=replace(settings, objectives=objectives),
        setting=LiveSetting.OBJECTIVE,
        stored=[list(change) for change in objectives],
        before=before,
        after=after,
        detail=f"It applies from step {next_step} on.",
    )


def _spend_cap(settings: CoordinatorSettings, cap: float) -> Taken:
    return Taken(
        settings=replace(settings, activation=replace(settings.activation, spend_cap_per_hour=cap)),
        setting=LiveSetting.SPEND_CAP,
        stored=cap,
        before=settings.activation.spend_cap_per_hour,
        after=cap,
    )


def _check_fresh(settings: CoordinatorSettings, *, next_step: int, published_version: int) -> None:
    """Raise RefusedChange if no lease could ever be made for some step.

    That is so if the newest version published before the step is too old for the step's staleness bound.
    """
    if settings.mode != "async":
        return
    for step in range(next_step, min(settings.steps, next_step + settings.interval) + 1):
        newest = max(published_version, settings.newest_due_version(step - 1))
        if newest < step - 1 - settings.staleness_bound:
            raise RefusedChange(
                f"Step {step} would wait for ever: the newest version published before it is {newest}, but "
                f"this bound needs version {step - 1 - settings.staleness_bound} or newer. Publish a version "
                "first, then repeat the change."
            )
