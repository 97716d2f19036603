"""Decides when the node keeps its machine awake: while it works on mains power, if its owner wants that.

A gap between two leases is no reason to let the machine sleep: a machine that its owner left hours ago would fall
asleep in the first gap, and the hub would lose the node. A pause, a battery and the setting take effect at once.
"""

from __future__ import annotations

from typing import Final

GAP_S: Final = 300.0
"""Seconds without work after which the machine may sleep."""


class Waking:
    """Decides whether the machine must stay awake. Call `wants` once a second with the time of a monotonic clock."""

    def __init__(self) -> None:
        self._worked_at: float | None = None

    def wants(self, *, allowed: bool, works: bool, on_battery: bool | None, now: float) -> bool:
        """Return True if the machine is to be kept awake now.

        `allowed`: the owner's settings allow it, and no hold (reason to pause) is in force; `works`: the node has work;
        `on_battery`: None = the machine has no battery.
        """
        if not allowed or on_battery:
            self._worked_at = None
        elif works:
            self._worked_at = now
        return self._worked_at is not None and now - self._worked_at < GAP_S
