"""Memory settings ("cuts") of a run's steps, in RUN/checkpoints/micro-batches.json, with one entry for each change.

The file is next to the checkpoints, and each entry names the first step to which it applies. So a step that is repeated
from an older checkpoint uses the same micro-batches and gives identical bits. A changed entry is written before the
step restarts with it: if one of several learner processes runs out of memory, all of them end, and only this file
survives.

A file of another device or of other settings is ignored.
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
class ChunkSizes:
    """A "cut": the memory settings of a step, that is the size of micro-batches and the use of gradient
    checkpointing.
    """

    micro_batch_tokens: int
    gradient_checkpointing: bool


class Cuts:
    """The memory settings ("cuts") of all steps, keyed by the first step to which each applies."""

    def __init__(self, checkpoints: Path, *, place: str = "") -> None:
        self._path = checkpoints / FILE
        self._place = place
        self._by_step: dict[int, ChunkSizes] = {}

    @classmethod
    def read(cls, checkpoints: Path, *, place: str) -> Cuts:
        """Read the file. `place` is a text that identifies the device and the settings. If the file is missing, broken
        or written for another `place`, the result has no entries.
        """
        cuts = cls(checkpoints, place=place)
        try:
            document = json.loads(cuts._path.read_bytes())
            if document["place"] == place:
                cuts.take(document)
        except FileNotFoundError:
            pass
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            log.warning("%s cannot be read and is ignored: %r", cuts._path, error)
        return cuts

    def take(self, frame: Mapping[str, Any]) -> None:
        """Replace all entries by those in `frame`, a result of the method `frame`."""
        self._by_step = {int(step): ChunkSizes(**_checked(cut)) for step, cut in frame["cuts"].items()}
        self._place = str(frame["place"])

    def frame(self) -> dict[str, Any]:
        """Return all entries as JSON values, for the file or for another process."""
        return {"place": self._place, "cuts": {str(step): asdict(cut) for step, cut in sorted(self._by_step.items())}}

    def at(self, step: int) -> ChunkSizes | None:
        """Return the memory settings that apply to this step; None if none are known."""
        known = [first for first in self._by_step if first <= step]
        return self._by_step[max(known)] if known else None

    def put(self, step: int, cut: ChunkSizes, *, write: bool = True) -> None:
        """Set the memory settings for this step and all later ones.

        Without a run directory on this host, or if the disk refuses the file, the settings stay only in memory.
        """
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
        raise ValueError(f"not a valid cut: {cut}")
    return {"micro_batch_tokens": tokens, "gradient_checkpointing": again}
