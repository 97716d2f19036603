"""Read a scenario (defaults < file < ECHO_SIMULATED_* environment < flags), and write an example file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from echo_hub.config.file import render_settings
from echo_hub.simulator.scenario import Scenario
from echo_shared.settings import load_settings

_HEADER: Final = (
    "What `echo-hub simulate FILE` simulates. A line that is removed falls back to the default. Environment variables "
    "(ECHO_SIMULATED_NODES__COUNT=1000 sets nodes.count) and flags win over this file."
)


def load_scenario(path: Path | None, overrides: Mapping[str, Any]) -> Scenario:
    """Load a scenario. `path` None: no file; `overrides`: flags nested by section, None = not given.

    Raises ConfigError, which names the setting, its value and the line, variable or flag that set it.
    """
    return load_settings(Scenario, path, overrides)


def render_scenario(scenario: Scenario) -> str:
    """Render `scenario` as commented TOML with every setting; `load_scenario` reads it back."""
    return render_settings(scenario, _HEADER)
