"""The command `echo-hub`, and `python -m echo_hub`: Ctrl-C ends it without a traceback, also while it loads."""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 130
"""A shell's status of what SIGINT has ended."""


def run() -> None:
    """`echo_hub.main.run`, whose imports take most of the first second: until then the system itself ends it."""
    heeded = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # A shell's background job leaves it to others.
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from echo_hub import main

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # What a command has begun, it ends in order.
    try:
        main.run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    run()
