"""Another objective for the rest of a run: what an operator may change of [objective] while the run goes on.

What decides which rewards and advantages the pages show of steps that are trained already stays as it is, and so does
what the learner reads at its start.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Final

from pydantic import ValidationError

from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.sections import HubConfig

FIXED: Final = ("chosen_advantage", "overlong", "overlong_buffer_tokens", "reference")
"""What a change may not touch; the advantage is that which is used, whether by name or as the paper has it."""


def as_text(objective: ObjectiveConfig) -> str:
    """What of it is not by default, as JSON; the same for the same objective."""
    return json.dumps(objective.model_dump(mode="json", exclude_defaults=True), sort_keys=True)


@dataclass(frozen=True, slots=True)
class ObjectiveRules:
    """What fits the rest of a run's settings."""

    config: HubConfig

    def __call__(self, before: str, wanted: str) -> tuple[str, str, str]:
        """The objective, as `as_text` has it, after NAME=VALUE pairs with blanks between them; and the pairs of the
        same names as they were and as they are. Raises ValueError."""
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
                    "go on with it in a run of its own, by echo-hub fork."
                )
        return as_text(new), _shown(old, pairs), _shown(new, pairs)


def _pair(one: str) -> tuple[str, str]:
    name, equals, value = one.removeprefix("objective.").partition("=")
    if not equals or name not in ObjectiveConfig.model_fields:
        names = ", ".join(ObjectiveConfig.model_fields)
        raise ValueError(f"{one[:80]!r} is no NAME=VALUE of [objective], which has {names}.")
    return name, value


def _shown(objective: ObjectiveConfig, names: dict[str, str]) -> str:
    return " ".join(f"{name}={getattr(objective, name)}" for name in names)


def _words(error: object) -> str:
    assert isinstance(error, dict)
    where = ".".join(str(part) for part in error["loc"])
    return f"{where}: {error['msg']}" if where else str(error["msg"])
