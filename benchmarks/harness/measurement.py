"""Result of a benchmark, and conditions of the measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from dataclasses import dataclass, field
from typing import Any

PACKAGES = (
    "echo-swarm",
    "torch",
    "transformers",
    "peft",
    "llama-cpp-python",
    "mlx",
    "mlx-lm",
    "libtorrent",
    "aiohttp",
    "websockets",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """`headline` has the main figures by name, `rows` all figures as one table."""

    headline: dict[str, Any]
    rows: list[dict[str, Any]]
    shown: tuple[str, ...] = ()
    """Columns to print; empty = all. The JSON file has all columns."""
    conditions: dict[str, Any] = field(default_factory=dict)


def conditions(seed: int) -> dict[str, Any]:
    """Describe machine, versions and seed."""
    versions: dict[str, str | None] = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "system": platform.system(),
        "python": platform.python_version(),
        "versions": versions,
        "seed": seed,
    }
