"""Imports that take long, without the collector."""

from __future__ import annotations

import gc
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
