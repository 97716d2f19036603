"""What a benchmark gives back, and the conditions it was measured under."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Mapping
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
    """`headline`: the few figures that matter, by name. `rows`: everything that was measured, one table."""

    headline: dict[str, Any]
    rows: list[dict[str, Any]]
    shown: tuple[str, ...] = ()
    """What of each row is printed; none = all. The JSON has all."""
    conditions: dict[str, Any] = field(default_factory=dict)
    picture: bytes | None = None
    """A PNG, written beside the figures."""
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    """Several PNGs by their names, written into a folder beside the figures."""


def conditions(seed: int) -> dict[str, Any]:
    """Machine, versions and seed."""
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
