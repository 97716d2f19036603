"""What `task.options` may hold, one frozen class a task."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from echo_shared.errors import ConfigError


class TaskOptions(BaseModel):
    """What all tasks' options have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    @classmethod
    def read(cls, task: str, options: Mapping[str, Any]) -> Self:
        """The options as `task` takes them. Raises ConfigError for one that does not exist or does not fit."""
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
