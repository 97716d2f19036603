"""How fast engines were measured to be, in a file of the data directory.

A figure counts for the very engine, hardware, base model and settings that it was measured with. What cannot be read is
measured again.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from echo_node.backends.base import EngineSettings
from echo_node.engine.widths import Place
from echo_node.host import hardware
from echo_shared.files import write_private

log = logging.getLogger(__name__)

MOST_ENTRIES: Final = 64
FAILURE_KEPT_S: Final = 86_400.0
"""An engine that failed is tried again after this time: the driver of its GPU may have been mended."""
GOOD_ENOUGH: Final = 0.9
"""Share of the best rate at which a narrower engine is preferred: it needs less memory, and answers sooner."""

TELLING_WIDTH: Final = 32
"""Figures for narrower ones alone do not say what more would give."""


class Row(BaseModel):
    """One figure: tokens of one prompt, or drawn tokens of `width` rollouts at once."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    kind: Literal["prefill", "decode"]
    width: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    seconds: Annotated[float, Field(gt=0)]
    tokens_per_s: Annotated[float, Field(gt=0)]


class Speeds(BaseModel):
    """What was measured of one engine; empty when it could not be measured, which counts for `FAILURE_KEPT_S`."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    rows: tuple[Row, ...]
    measured_at: float
    """Seconds since the epoch."""
    failure: str = ""
    """What went wrong, if anything did."""

    @classmethod
    def now(cls, rows: Sequence[Mapping[str, Any]], failure: str = "") -> Speeds:
        """The speeds in the rows that `measure` gave, as of now."""
        return cls.model_validate({"rows": rows, "measured_at": time.time(), "failure": failure})

    def __str__(self) -> str:
        if not self.decode:
            return "The engine is too slow to be measured in that time."
        rates = ", ".join(f"{rate:.0f} at width {width}" for width, rate in self.decode.items())
        return f"Tokens a second: {rates}; prompts {self.prefill:.0f}."

    @property
    def prefill(self) -> float:
        """Prompt tokens a second; 0 = unknown."""
        return max((row.tokens_per_s for row in self.rows if row.kind == "prefill"), default=0.0)

    @property
    def decode(self) -> dict[int, float]:
        """Drawn tokens a second by width."""
        return {row.width: row.tokens_per_s for row in self.rows if row.kind == "decode"}

    @property
    def best(self) -> float:
        """Drawn tokens a second at the fastest width; 0 = unknown."""
        return max(self.decode.values(), default=0.0)

    @property
    def width(self) -> int:
        """The least width that is nearly as fast as the best; 0 = unknown, as where there was no time for wide ones."""
        found = min((width for width, rate in self.decode.items() if rate >= GOOD_ENOUGH * self.best), default=0)
        return 0 if found == max(self.decode, default=0) < TELLING_WIDTH else found

    def rate(self, width: int) -> float:
        """Drawn tokens a second at `width`, or at the next narrower one that was measured; 0 = unknown."""
        return max(((measured, rate) for measured, rate in self.decode.items() if measured <= width), default=(0, 0.0))[
            1
        ]


_Entries = TypeAdapter(dict[str, Speeds])


class SpeedBook:
    """The speeds of one data directory. Calls block; a disk that cannot be written is told in the log."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def find(self, place: Place, settings: EngineSettings) -> Speeds | None:
        """What was measured in this place with these settings, whatever their width."""
        found = self._entries().get(_key(place, settings))
        is_old = found is not None and found.failure and time.time() - found.measured_at >= FAILURE_KEPT_S
        return None if is_old else found

    def remember(self, place: Place, settings: EngineSettings, speeds: Speeds) -> None:
        entries = {**self._entries(), _key(place, settings): speeds}
        newest = sorted(entries.items(), key=lambda item: item[1].measured_at)[-MOST_ENTRIES:]
        try:
            write_private(self._file, _Entries.dump_json(dict(newest), indent=1))
        except OSError as error:
            log.warning("The engine's speed cannot be remembered: %s: %s", self._file, error.strerror)

    def _entries(self) -> dict[str, Speeds]:
        try:
            return _Entries.validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            log.warning("What engines were measured at cannot be read: %s: %s", self._file, error.strerror)
        except ValidationError:
            log.warning("What engines were measured at is measured again: %s is damaged.", self._file)
        return {}


def _key(place: Place, settings: EngineSettings) -> str:
    threads = settings.threads or hardware.sensible_threads()
    precision = f"{settings.precision}, {settings.kv_cache_bytes} bytes of KV cache"
    helpers = " + ".join(helper.partition("#")[0] for helper in settings.helpers)  # Without their codes.
    return " | ".join([*dataclasses.astuple(place), f"{threads} threads", precision, helpers])
