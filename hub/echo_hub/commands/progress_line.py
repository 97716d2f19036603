"""Show the progress of a command on stderr: as a live line on a terminal, otherwise as a new line every `PLAIN_S`."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner

if TYPE_CHECKING:
    from echo_hub.evaluation.work_count import WorkCount

errors = Console(stderr=True)
"""Console for messages on stderr. Log lines use it too, so that they appear above a live line."""
PLAIN_S: Final = 10.0
"""Seconds between two lines if stderr is no terminal."""


@contextmanager
def progress_line(count: WorkCount) -> Iterator[None]:
    """Show `count` until the block ends. On a terminal, the line disappears at the end."""
    if sys.stderr.isatty() and errors.is_interactive:
        spinner = Spinner("line")

        def line() -> Spinner:
            spinner.update(text=count.text(time.monotonic()))
            return spinner

        # While the live line is shown, Rich sends all printed text to stderr, above the line. Let it do so only if
        # stdout is a terminal too.
        is_beside = sys.stdout.isatty()
        with Live(get_renderable=line, console=errors, transient=True, redirect_stdout=is_beside):
            yield
        return
    ended = threading.Event()
    printing = threading.Thread(target=_print_lines, args=(count, ended), name="progress", daemon=True)
    printing.start()
    try:
        yield
    finally:
        ended.set()
        printing.join()


def _print_lines(count: WorkCount, ended: threading.Event) -> None:
    shown = ""
    while not ended.wait(PLAIN_S):
        if (text := count.text(time.monotonic())) != shown:
            with suppress(OSError, ValueError):  # The reader of stderr may have ended.
                print(text, file=sys.stderr, flush=True)
            shown = text
