"""Notices about releases other than the running one."""

from __future__ import annotations

import re
from typing import Final

import echo_shared
from echo_shared.errors import EchoError
from echo_shared.installation import how_to_upgrade

TAKES_OVER: Final = "takes_over"
"""Code of the error that ends a node and lets the process continue as another release."""
_NUMBERS: Final = re.compile(r"\d{1,9}(?:\.\d{1,9})*")


def newer_release(hub_version: str) -> str:
    """Return a sentence if the hub runs a newer release, else ""."""
    if not is_newer(hub_version, echo_shared.__version__):
        return ""
    return f"The hub runs release {hub_version}, this node {echo_shared.__version__}. {how_to_upgrade()}"


def upgraded(release: str, *, takes_over: bool = False) -> EchoError:
    """Return the error that ends a refused node after another release was installed. A service then restarts with the
    new release. `takes_over`: this process itself continues as the new release.
    """
    return EchoError(
        f"Release {release} is installed now. This process runs {echo_shared.__version__}, which the hub refuses.",
        do="Restart the node: echo-node run. A service restarts by itself.",
        code=TAKES_OVER if takes_over else "upgraded",
    )


def is_newer(theirs: str, own: str) -> bool:
    """Return True if `theirs` is later than `own`, by their leading numbers; False if one of them has no number."""
    numbers = [_numbers(version) for version in (theirs, own)]
    return all(numbers) and numbers[0] > numbers[1]


def _numbers(version: str) -> tuple[int, ...]:
    found = _NUMBERS.match(version)
    parts = [] if found is None else [int(part) for part in found.group().split(".")]
    while parts and parts[-1] == 0:
        del parts[-1]  # Drop final zeros, because release 1.0 equals release 1.
    return tuple(parts) if found is None or parts else (0,)
