"""Measured speeds of engines, in a file of the data directory.

A speed applies only to its engine, hardware, base model and settings. If the file cannot be read, engines are measured
again.
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
from echo_node.engine.widths import EngineMemoryCase
from echo_node.host import hardware
from echo_shared.files.atomic import write_private

log = logging.getLogger(__name__)

MOST_ENTRIES: Final = 64
FAILURE_KEPT_S: Final = 86_400.0
"""Seconds after which a failed engine is tried again, because its GPU's driver may have been repaired."""
GOOD_ENOUGH: Final = 0.9
"""If a narrower width reaches this fraction of the fastest width's rate, it is preferred: it needs less memory and
answers sooner. (Width: rollouts sampled at the same time.)
"""

TELLING_WIDTH: Final = 32
"""Smallest width whose rate predicts the rates of larger widths."""


class Row(BaseModel):
    """One measurement: tokens of one prompt (prefill), or drawn tokens of `width` rollouts at the same time
    (decode).
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    kind: Literal["prefill", "decode"]
    width: Annotated[int, Field(ge=1)]
    tokens: Annotated[int, Field(ge=1)]
    seconds: Annotated[float, Field(gt=0)]
    tokens_per_s: Annotated[float, Field(gt=0)]


class Speeds(BaseModel):
    """Measurements of one engine. Without rows the engine failed or was too slow; a failure counts for `FAILURE_KEPT_S`
    seconds.
    """

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    rows: tuple[Row, ...]
    measured_at: float
    """Time of the measurement, in seconds since the epoch."""
    failure: str = ""
    """Error of the measurement; empty = none."""

    @classmethod
    def now(cls, rows: Sequence[Mapping[str, Any]], failure: str = "") -> Speeds:
        """Return the speeds for `rows` of `measure.measure`, measured now."""
        return cls.model_validate({"rows": rows, "measured_at": time.time(), "failure": failure})

    def __str__(self) -> str:
        if not self.decode:
            return "The engine is too slow to be measured in that time."
        rates = ", ".join(f"{rate:.0f} at width {width}" for width, rate in self.decode.items())
        return f"Tokens per second: {rates}; prompts {self.prefill:.0f}."

    @property
    def prefill(self) -> float:
        """Prompt tokens per second; 0 = unknown."""
        return max((row.tokens_per_s for row in self.rows if row.kind == "prefill"), default=0.0)

    @property
    def decode(self) -> dict[int, float]:
        """Drawn tokens per second, by width (rollouts at the same time)."""
        return {row.width: row.tokens_per_s for row in self.rows if row.kind == "decode"}

    @property
    def best(self) -> float:
        """Drawn tokens per second at the fastest width (rollouts at the same time); 0 = unknown."""
        return max(self.decode.values(), default=0.0)

    @property
    def width(self) -> int:
        """Smallest measured width (rollouts at the same time) that is nearly as fast as the fastest one. 0 = unknown,
        or even the widest measured width, the fastest one, is below TELLING_WIDTH.
        """
        found = min((width for width, rate in self.decode.items() if rate >= GOOD_ENOUGH * self.best), default=0)
        return 0 if found == max(self.decode, default=0) < TELLING_WIDTH else found

    def rate(self, width: int) -> float:
        """Return the drawn tokens per second at `width` (rollouts at the same time), or at the next smaller measured
        width; 0 = unknown.
        """
        return max(((measured, rate) for measured, rate in self.decode.items() if measured <= width), default=(0, 0.0))[
            1
        ]


_Entries = TypeAdapter(dict[str, Speeds])


class SpeedBook:
    """Measured speeds of engines, in a file of one data directory. All methods block the calling thread. Write errors
    are only logged.
    """

    def __init__(self, file: Path) -> None:
        self._file = file

    def find(self, place: EngineMemoryCase, settings: EngineSettings) -> Speeds | None:
        """Return the measurements for the engine, hardware and base model of `place` with these settings, or None. The
        settings' width is ignored.
        """
        found = self._entries().get(_key(place, settings))
        is_old = found is not None and found.failure and time.time() - found.measured_at >= FAILURE_KEPT_S
        return None if is_old else found

    def remember(self, place: EngineMemoryCase, settings: EngineSettings, speeds: Speeds) -> None:
        entries = {**self._entries(), _key(place, settings): speeds}
        newest = sorted(entries.items(), key=lambda item: item[1].measured_at)[-MOST_ENTRIES:]
        try:
            write_private(self._file, _Entries.dump_json(dict(newest), indent=1))
        except OSError as error:
            log.warning("The engine's speed cannot be stored: %s: %s", self._file, error.strerror)

    def _entries(self) -> dict[str, Speeds]:
        try:
            return _Entries.validate_json(self._file.read_bytes())
        except FileNotFoundError:
            return {}
        except OSError as error:
            log.warning("The engines' measured speeds cannot be read: %s: %s", self._file, error.strerror)
        except ValidationError:
            log.warning("The engines' speeds are measured again: %s is damaged.", self._file)
        return {}


def _key(place: EngineMemoryCase, settings: EngineSettings) -> str:
    threads = settings.threads or hardware.sensible_threads()
    precision = f"{settings.precision}, {settings.kv_cache_bytes} bytes of KV cache"
    # Leave out the helpers' secret codes.
    helpers = " + ".join(helper.partition("#")[0] for helper in settings.helpers)
    return " | ".join([*dataclasses.astuple(place), f"{threads} threads", precision, helpers])
