"""An engine around another that writes down each token as it is drawn: what a killed node had drawn can be read.

A file of it is records of (lease id, index, tokens so far), which outlive the process.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from echo_node.backends.base import Engine, EngineEvent, EngineSettings, PreparedPolicy
from echo_shared.sampling import DrawnPart, FinishedRollout, GroupRequest
from echo_shared.scoring import Intervals

_RECORD: Final = struct.Struct("<qqq")

Drawn = dict[tuple[int, int], int]
"""Tokens of each rollout in progress, by lease and index, those that were given to go on with included."""


class CountedEngine:
    """The other engine's news are looked at after each of its steps, and kept until somebody asks for them."""

    def __init__(self, engine: Engine, file: Path) -> None:
        self._engine = engine
        self._file = file
        self._news: dict[tuple[int, int], list[DrawnPart]] = {}

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        width = self._engine.open(base_dir, derived_dir, settings)
        self.precision, self.scores = self._engine.precision, self._engine.scores
        self.converted = self._engine.converted
        return width

    def prepare(self, adapter_dir: Path) -> PreparedPolicy:
        return self._engine.prepare(adapter_dir)

    def set_policy(self, policy: PreparedPolicy | None) -> None:
        self._engine.set_policy(policy)

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        with self._file.open("ab", buffering=0) as file:
            for events in self._engine.sample(groups):
                parts = self._engine.news()
                for part in parts:
                    self._news.setdefault((part.lease_id, part.index), []).append(part)
                file.write(b"".join(_RECORD.pack(p.lease_id, p.index, p.start + len(p.ids)) for p in parts))
                for event in events:
                    if isinstance(event, FinishedRollout):
                        self._news.pop((event.lease_id, event.index), None)
                yield events

    def cancel(self, lease_id: int) -> None:
        self._engine.cancel(lease_id)
        self._news = {name: parts for name, parts in self._news.items() if name[0] != lease_id}

    def news(self) -> list[DrawnPart]:
        news, self._news = self._news, {}
        return [_joined(parts) for parts in news.values()]

    def score(self, ids: NDArray[np.int32], first: int, temperature: float) -> Intervals:
        return self._engine.score(ids, first, temperature)

    def close(self) -> None:
        self._engine.close()


def read_drawn(file: Path) -> Drawn:
    """What had been drawn when the process ended; of a rollout that was finished, nearly all."""
    written = file.read_bytes() if file.exists() else b""
    whole = written[: len(written) // _RECORD.size * _RECORD.size]
    return {(lease_id, index): count for lease_id, index, count in _RECORD.iter_unpack(whole)}


def _joined(parts: list[DrawnPart]) -> DrawnPart:
    return DrawnPart(
        lease_id=parts[0].lease_id,
        index=parts[0].index,
        start=parts[0].start,
        policy_version=parts[0].policy_version,
        ids=np.concatenate([part.ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        sampling_s=parts[-1].sampling_s,
    )
