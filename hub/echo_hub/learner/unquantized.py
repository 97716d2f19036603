"""Runs a module as a program without bitsandbytes: `python -m echo_hub.learner.unquantized MODULE [ARGUMENT...]`.

PEFT loads bitsandbytes wherever it is installed, which has PyTorch load its compiler: two of the eight seconds of
processor time until a learner is there, for what only a quantised base has a use for.

Nor does the collector look for garbage while the module is imported, which takes a sixth of what is left: all that is
loaded stays. From then on it does, and passes over what was loaded.
"""

from __future__ import annotations

import gc
import importlib
import runpy
import sys
from collections.abc import Sequence
from typing import Final

BLOCKED: Final = "bitsandbytes"


def command(module: str) -> Sequence[str]:
    """The module to run, and its arguments, so that `module` runs without bitsandbytes."""
    return (__name__, module)


if __name__ == "__main__":
    sys.modules[BLOCKED] = None  # type: ignore[assignment]  # To the import system it is not there.
    del sys.argv[0]
    gc.disable()
    importlib.import_module(sys.argv[0])
    gc.freeze()
    gc.enable()
    del sys.modules[sys.argv[0]]  # Else it is warned of when it runs; what it has imported is there.
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
