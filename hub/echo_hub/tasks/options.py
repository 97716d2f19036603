"""Base class of `task.options`. Each task has a frozen subclass of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from echo_shared.errors import ConfigError


class TaskOptions(BaseModel):
    """Options common to all tasks."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @property
    def variables(self) -> Sequence[str]:
        """Environment variables of the hub that the task's own process gets."""
        return ()

    @classmethod
    def read(cls, task: str, options: Mapping[str, Any]) -> Self:
        """Validate the options of `task`. Raises ConfigError for an unknown or invalid option."""
        try:
            return cls.model_validate(dict(options))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"]))
            raise ConfigError(
                f"The options of the task {task} are not valid.",
                got=f"task.options.{name} = {first['input']!r}: {first['msg']}",
                do=f"Its options are {', '.join(cls.model_fields)}.",
            ) from error
