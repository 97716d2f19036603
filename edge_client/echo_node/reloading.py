"""Which of a running node's parts take new settings, and which settings wait for its next start.

A setting is of the part that works by it: the owner's watch, or updates, at once; the engine, which is ended and
started again; what the node says of itself, by a new introduction. All others are read once, when the node starts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from echo_node.config import NodeConfig
from echo_node.settings_file import DECIDE_THE_ENGINE, keys_of, value_of

ENGINE: Final = frozenset(
    {
        "backend",
        "threads",
        "helpers",
        "precision",
        "kv_cache_bytes",
        "width",
        "bench_seconds",
        "cage",
        "memory_limit_bytes",
        "stream_s",
        "manners.priority",
        "manners.cpu_share",
    }
)
"""What an engine is started with."""
INTRODUCTION: Final = frozenset({"name", "cost_per_hour", "power_watts"})
"""What the hub is told when the node connects."""
WATCH: Final = frozenset({key for key in keys_of() if key.startswith("manners.")} | {"update"}) - ENGINE
"""What is looked at again and again while the node runs: by the owner's watch, and before an update."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The keys that differ, by who works by them."""

    watch: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    introduction: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return self.watch + self.engine + self.introduction + self.restart

    @property
    def choice(self) -> bool:
        """Whether another engine may be the one to start."""
        return not DECIDE_THE_ENGINE.isdisjoint(self.engine)


def in_force(before: NodeConfig, after: NodeConfig) -> NodeConfig:
    """What a running node that is given `after` works by: the settings that wait for its next start are as before."""
    waiting = changes(before, after).restart
    return after.model_copy(update={key: value_of(before, key) for key in waiting})


def changes(before: NodeConfig, after: NodeConfig) -> Changes:
    """What differs, in the order of the settings."""
    differ = [key for key in keys_of() if value_of(before, key) != value_of(after, key)]
    live = WATCH | ENGINE | INTRODUCTION
    return Changes(
        watch=tuple(key for key in differ if key in WATCH),
        engine=tuple(key for key in differ if key in ENGINE),
        introduction=tuple(key for key in differ if key in INTRODUCTION),
        restart=tuple(key for key in differ if key not in live),
    )
