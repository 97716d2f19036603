"""Change the settings in [objective] during a run.

Two kinds of settings cannot change: those that determine the displayed rewards and advantages of trained steps, and
those that the learner reads only at its start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.sections import HubConfig

FIXED: Final = ("chosen_advantage", "overlong", "overlong_buffer_tokens", "reference")
"""Settings that a change must not touch. chosen_advantage is the advantage in use: the setting's, or the paper's if the
setting is "published"."""


def as_text(objective: ObjectiveConfig) -> str:
    """Return the objective's settings that differ from their defaults, as canonical JSON."""
    return json.dumps(objective.model_dump(mode="json", exclude_defaults=True), sort_keys=True)


@dataclass(frozen=True, slots=True)
class ObjectiveRules:
    """Checks changes of the objective against the other settings of a run."""

    config: HubConfig

    def __call__(self, before: str, wanted: str) -> tuple[str, str, str]:
        """Apply NAME=VALUE pairs, separated by blanks, to the objective `before`.

        Returns the new objective (in the form of `as_text`), and the changed pairs before and after. Raises ValueError.
        """
        pairs = dict(_pair(one) for one in wanted.split())
        old = ObjectiveConfig.model_validate_json(before)
        try:
            new = ObjectiveConfig.model_validate({**old.model_dump(), **pairs})
            HubConfig.model_validate({**self.config.model_dump(), "objective": new.model_dump()})
        except ValidationError as error:
            raise ValueError("; ".join(map(_words, error.errors(include_url=False)))) from None
        for name in FIXED:
            if getattr(new, name) != getattr(old, name):
                shown = name.removeprefix("chosen_")
                raise ValueError(
                    f"objective.{shown} cannot change in a run ({getattr(old, name)} to {getattr(new, name)}): "
                    "use a separate run, made by echo-hub fork."
                )
        return as_text(new), _shown(old, pairs), _shown(new, pairs)


def _pair(one: str) -> tuple[str, str]:
    name, equals, value = one.removeprefix("objective.").partition("=")
    if not equals or name not in ObjectiveConfig.model_fields:
        names = ", ".join(ObjectiveConfig.model_fields)
        raise ValueError(f"{one[:80]!r} is not NAME=VALUE of a setting in [objective], which has {names}.")
    return name, value


def _shown(objective: ObjectiveConfig, names: dict[str, str]) -> str:
    return " ".join(f"{name}={getattr(objective, name)}" for name in names)


def _words(error: object) -> str:
    assert isinstance(error, dict)
    where = ".".join(str(part) for part in error["loc"])
    return f"{where}: {error['msg']}" if where else str(error["msg"])
