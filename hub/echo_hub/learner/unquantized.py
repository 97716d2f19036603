"""Runs a module as a program without what only other learners need: `python -m echo_hub.learner.unquantized MODULE
[ARGUMENT...]`.

PEFT loads bitsandbytes wherever it is installed, which has PyTorch load its compiler: two of the eight seconds of
processor time until a learner is there, for what only a quantised base has a use for. Transformers loads SciPy's
optimizers, a tenth of what is left, for the losses of models that find objects in pictures.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Sequence
from typing import Final

from echo_shared.importing import do_without, uncollected

BLOCKED: Final = ("bitsandbytes", "scipy")


def command(module: str) -> Sequence[str]:
    """The module to run, and its arguments, so that `module` runs without them."""
    return (__name__, module)


if __name__ == "__main__":
    do_without(*BLOCKED)
    del sys.argv[0]
    with uncollected():
        importlib.import_module(sys.argv[0])
    del sys.modules[sys.argv[0]]  # Else it is warned of when it runs; what it has imported is there.
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
