"""Base class and common types of the sections of a run's settings."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from echo_shared.described import Described

Port = Annotated[int, Field(ge=0, le=65535)]
Precision = Literal["auto", "float32", "bfloat16"]


class Section(Described):
    """A frozen section, in which unknown keys are errors. The docstring of a field is the field's comment in
    config.toml."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
