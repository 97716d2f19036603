"""The command `echo-node`, and `python -m echo_node`: Ctrl-C ends it at once and silently, also while it loads.

The shell then sees status 130. What must end in good order says so itself: `echo_node.host.signals`.
"""

from __future__ import annotations

import signal


def run() -> None:
    """`echo_node.main.run`, whose imports take most of the first second."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # A shell's background job leaves it to others.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from echo_node import main

    main.run()


if __name__ == "__main__":
    run()
