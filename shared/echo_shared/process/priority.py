"""Lowers the priority of processes whose work can wait."""

from __future__ import annotations

import sys
from typing import Final

import psutil

NICENESS: Final = 10
"""Niceness on POSIX systems. On a core that the learner also uses, a process of this niceness gets about a tenth of the
learner's processor time.
"""


def yield_to_others() -> None:
    """Give this process a low priority, so that others on the machine go first."""
    me = psutil.Process()
    if sys.platform == "win32":
        me.nice(psutil.BELOW_NORMAL_PRIORITY_CLASS)
    else:
        me.nice(max(NICENESS, int(me.nice())))
