"""Imports that take long: without the collector, and without what nobody has a use for."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """For imports alone: inside, nobody looks for garbage, which takes a sixth of their time, for all that is loaded
    stays. From then on the collector passes over what was loaded."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def do_without(*modules: str) -> None:
    """For a program that has no use for them: from here on they are not there to its imports, installed or not."""
    for name in modules:
        sys.modules[name] = None  # type: ignore[assignment]  # What the import system takes for that.
