"""An engine that writes down each token as it is drawn, so that the draws of a killed node can be read.

Its file has records of (lease id, index, tokens so far), which outlive the process.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np

from benchmarks.harness.wrapped_engine import WrappedEngine
from echo_node.backends.base import Engine, EngineEvent
from echo_shared.sampling import DrawnPart, FinishedRollout, GroupRequest

_RECORD: Final = struct.Struct("<qqq")

Drawn = dict[tuple[int, int], int]
"""Tokens of each rollout in progress, by lease and index, with the tokens that the node was given."""


class CountedEngine(WrappedEngine):
    """Collects the engine's news after each step until the node reads them."""

    def __init__(self, engine: Engine, file: Path) -> None:
        super().__init__(engine)
        self._file = file
        self._news: dict[tuple[int, int], list[DrawnPart]] = {}

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        with self._file.open("ab", buffering=0) as file:
            for events in super().sample(groups):
                parts = super().news()
                for part in parts:
                    self._news.setdefault((part.lease_id, part.index), []).append(part)
                file.write(b"".join(_RECORD.pack(p.lease_id, p.index, p.start + len(p.ids)) for p in parts))
                for event in events:
                    if isinstance(event, FinishedRollout):
                        self._news.pop((event.lease_id, event.index), None)
                yield events

    def cancel(self, lease_id: int) -> None:
        super().cancel(lease_id)
        self._news = {name: parts for name, parts in self._news.items() if name[0] != lease_id}

    def news(self) -> list[DrawnPart]:
        news, self._news = self._news, {}
        return [_joined(parts) for parts in news.values()]


def read_drawn(file: Path) -> Drawn:
    """Read what had been drawn when the process ended. A record that was cut is left out."""
    written = file.read_bytes() if file.exists() else b""
    whole = written[: len(written) // _RECORD.size * _RECORD.size]
    return {(lease_id, index): count for lease_id, index, count in _RECORD.iter_unpack(whole)}


def _joined(parts: list[DrawnPart]) -> DrawnPart:
    first = parts[0]
    return DrawnPart(
        lease_id=first.lease_id,
        index=first.index,
        start=first.start,
        policy_version=first.policy_version,
        ids=np.concatenate([part.ids for part in parts]),
        logprobs=np.concatenate([part.logprobs for part in parts]),
        sampling_s=parts[-1].sampling_s,
    )
