"""Sorts changed settings by what a running node must do to use them.

The owner's watch and the updates use their settings at once. The engine is restarted for its settings. The introduction
is sent again. All other settings wait for the next start of the node.
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
        "kept_keys_share",
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
"""Settings that need a restart of the engine."""
INTRODUCTION: Final = frozenset({"name", "cost_per_hour", "power_watts", "answers", "refused_tenants"})
"""Settings that the introduction to the hub contains."""
WATCH: Final = frozenset({key for key in keys_of() if key.startswith("manners.")} | {"update"}) - ENGINE
"""Settings that the owner's watch and the updater use at once."""


@dataclass(frozen=True, slots=True)
class ChangedSettings:
    """Keys of changed settings, by the part of the node that uses them."""

    watch: tuple[str, ...] = ()
    engine: tuple[str, ...] = ()
    introduction: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return self.watch + self.engine + self.introduction + self.restart

    @property
    def choice(self) -> bool:
        """True if a changed setting may select another engine."""
        return not DECIDE_THE_ENGINE.isdisjoint(self.engine)


def in_force(before: NodeConfig, after: NodeConfig) -> NodeConfig:
    """Return the settings in force after a reload to `after`. Settings that need a restart of the node keep their old
    values.
    """
    waiting = changes(before, after).restart
    return after.model_copy(update={key: value_of(before, key) for key in waiting})


def changes(before: NodeConfig, after: NodeConfig) -> ChangedSettings:
    """Return the keys whose values differ, in the order of the settings."""
    differ = [key for key in keys_of() if value_of(before, key) != value_of(after, key)]
    live = WATCH | ENGINE | INTRODUCTION
    return ChangedSettings(
        watch=tuple(key for key in differ if key in WATCH),
        engine=tuple(key for key in differ if key in ENGINE),
        introduction=tuple(key for key in differ if key in INTRODUCTION),
        restart=tuple(key for key in differ if key not in live),
    )
