"""Metric sinks: other programs' curves of a run, beside the hub's own pages. One interface for all.

    train/*         the figures of `echo_shared.step_figures`, and the mean reward
    reward/*        the mean of each component of the step's rewards, where they have several
    rollouts/*      what the step was made of: number, tokens, staleness, and how many a second were trained on
    drops/*         rollouts dropped since the step before, by reason
    eval/*          held-out problems; step is the version that was evaluated
    distribution/*  histograms of the step's rollouts: reward, completion_tokens, staleness
    samples         texts of a few rollouts of the step, where the operator has turned that on

The step is a policy version everywhere, and the wall time that of the hub's books. The store is the truth; a sink
follows it (`echo_hub.sinks.following`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

DISTRIBUTION: Final = "distribution/"
SAMPLES: Final = "samples"


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleText:
    """One rollout as people read it; its texts are a model's or a stranger's: hostile input."""

    rollout_id: str
    reward: float
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What a sink is told of one policy version, by tag."""

    policy_version: int
    at: float
    scalars: Mapping[str, float]
    histograms: Mapping[str, Sequence[float]] = field(default_factory=dict)
    texts: Sequence[SampleText] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far a sink has come."""

    step: int = 0
    """The newest step that it has."""
    evaluated_at: float = 0.0
    """It has all evaluations up to then."""


class MetricSink(Protocol):
    """Where entries go. Whatever a method raises is the sink's failure, and never the run's.

    After a failure, or after it was cancelled for taking too long, it is closed, and opened anew some minutes later.
    """

    @property
    def name(self) -> str:
        """For people."""

    async def open(self) -> Position:
        """Gets ready; what it has already."""

    async def write(self, entries: Sequence[Entry], position: Position) -> None:
        """Returns when the entries are its own to keep; with them it has come to `position`."""

    async def close(self) -> None:
        """Lets go of everything. Harmless when it is not open."""
