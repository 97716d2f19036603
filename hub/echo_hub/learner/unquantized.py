"""Run a module as a program, without imports that only other kinds of learner need.

Usage: `python -m echo_hub.learner.unquantized MODULE [ARGUMENT...]`. PEFT imports bitsandbytes wherever it is
installed, which makes PyTorch load its compiler. That takes two of the eight processor seconds of a learner's start,
and only a quantised base needs it. Transformers imports SciPy's optimizers for losses of object detection models, which
takes a tenth of the rest.
"""

from __future__ import annotations

import importlib
import runpy
import sys
from collections.abc import Sequence
from typing import Final

from echo_shared.process.importing import do_without, uncollected

BLOCKED: Final = ("bitsandbytes", "scipy")


def command(module: str) -> Sequence[str]:
    """Return the arguments after `python -m` that run the program `module` without the imports that this file
    avoids.
    """
    return (__name__, module)


if __name__ == "__main__":
    do_without(*BLOCKED)
    del sys.argv[0]
    with uncollected():
        importlib.import_module(sys.argv[0])
    # Unload the module, because runpy would warn about it. The modules that it has imported stay loaded.
    del sys.modules[sys.argv[0]]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
