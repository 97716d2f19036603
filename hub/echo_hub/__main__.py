"""The command `echo-hub`, also `python -m echo_hub`. Ctrl-C ends it without a traceback, even during imports."""

from __future__ import annotations

import signal
import sys

INTERRUPTED = 130
"""Exit status that shells give to a process that SIGINT has ended."""


def run() -> None:
    """Run `echo_hub.main.run`. Its imports take most of the first second; until they are done, SIGINT kills the process
    directly, because Python would print a traceback.
    """
    heeded = signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # Shells make background jobs ignore SIGINT.
    if heeded:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from echo_hub import main

    if heeded:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # Lets a command clean up on Ctrl-C.
    try:
        main.run()
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    run()
