"""What the steps of a run are cut into: RUN/checkpoints/micro-batches.json, one entry for each change.

It stands beside the checkpoints, and by step, so that a step that is trained again from an older checkpoint is cut as
it was the first time, and its result is the same to the bit. It is written at once, before the step is begun anew: of a
learner of several processes, which all end when one is out of memory, it is all that is left.

What was found out on another device, or with other settings, does not count.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

log = logging.getLogger(__name__)

FILE: Final = "micro-batches.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How much is computed at once."""

    micro_batch_tokens: int
    gradient_checkpointing: bool


class Cuts:
    """By the first step that each holds for."""

    def __init__(self, checkpoints: Path, *, place: str = "") -> None:
        self._path = checkpoints / FILE
        self._place = place
        self._by_step: dict[int, Cut] = {}

    @classmethod
    def read(cls, checkpoints: Path, *, place: str) -> Cuts:
        """`place`: device and settings. A file that is missing, broken or of another place is as good as none."""
        cuts = cls(checkpoints, place=place)
        try:
            document = json.loads(cuts._path.read_bytes())
            if document["place"] == place:
                cuts.take(document)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            log.warning("%s cannot be read and does not count: %r", cuts._path, error)
        return cuts

    def take(self, frame: Mapping[str, Any]) -> None:
        """Takes over what `frame` gave."""
        self._by_step = {int(step): Cut(**_checked(cut)) for step, cut in frame["cuts"].items()}
        self._place = str(frame["place"])

    def frame(self) -> dict[str, Any]:
        """All of them, for a file or another process."""
        return {"place": self._place, "cuts": {str(step): asdict(cut) for step, cut in sorted(self._by_step.items())}}

    def at(self, step: int) -> Cut | None:
        """What holds for this step."""
        known = [first for first in self._by_step if first <= step]
        return self._by_step[max(known)] if known else None

    def put(self, step: int, cut: Cut, *, write: bool = True) -> None:
        """It holds from this step on, whatever was known of later ones. A disk that refuses costs the memory of it, and
        so does a host that does not have the run's directory."""
        self._by_step = {first: old for first, old in self._by_step.items() if first < step} | {step: cut}
        if not write or not self._path.parent.parent.is_dir():
            return
        unfinished = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            self._path.parent.mkdir(exist_ok=True)
            unfinished.write_text(json.dumps(self.frame(), indent=1), encoding="utf-8")
            unfinished.replace(self._path)
        except OSError as error:
            log.warning("%s cannot be written: %s", self._path, error)


def _checked(cut: Mapping[str, Any]) -> dict[str, Any]:
    tokens, again = cut["micro_batch_tokens"], cut["gradient_checkpointing"]
    if type(tokens) is not int or tokens < 1 or type(again) is not bool:
        raise ValueError(f"no cut: {cut}")
    return {"micro_batch_tokens": tokens, "gradient_checkpointing": again}
