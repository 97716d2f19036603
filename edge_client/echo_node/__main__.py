"""The command `echo-node`, and `python -m echo_node`. Ctrl-C ends the process at once and silently, even during
imports.

The shell then sees status 130. Commands that need an orderly end install handlers: `echo_node.host.signals`.
"""

from __future__ import annotations

import signal


def run() -> None:
    """Run `echo_node.main.run`. The import is delayed to here: it takes most of the first second."""
    # Keep SIGINT ignored if it already is, as in a shell's background jobs.
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from echo_node import main

    main.run()


if __name__ == "__main__":
    run()
