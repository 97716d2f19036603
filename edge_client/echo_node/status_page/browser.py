"""Opens the status page in the browser, in which no other user of this machine can follow."""

from __future__ import annotations

import html
import webbrowser
from pathlib import Path
from typing import Final

from echo_shared.errors import StorageError
from echo_shared.files import write_private

_PAGE: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Echo</title>
<meta name="referrer" content="no-referrer"><meta http-equiv="refresh" content="0;url={url}">
<p><a href="{url}">Go on</a></p></html>
"""


def open_in_browser(url: str, file: Path) -> bool:
    """Whether a browser was started. It is given the name of a private file that leads to `url`: what a program is
    started with, all users of the machine can read, and the first who shows the code is let in."""
    try:
        write_private(file, _PAGE.format(url=html.escape(url)).encode())
    except OSError as error:
        raise StorageError("The page cannot be opened.", got=f"{file}: {error.strerror}") from error
    return webbrowser.open(file.as_uri())
