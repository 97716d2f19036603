"""Opens the status page in the browser, without revealing its address to other users of this machine."""

from __future__ import annotations

import html
import webbrowser
from pathlib import Path
from typing import Final

from echo_shared.errors import StorageError
from echo_shared.files.atomic import write_private

_PAGE: Final = """<!doctype html><html lang="en"><meta charset="utf-8"><title>Echo</title>
<meta name="referrer" content="no-referrer"><meta http-equiv="refresh" content="0;url={url}">
<p><a href="{url}">Continue</a></p></html>
"""


def open_in_browser(url: str, file: Path) -> bool:
    """Start a browser. Return False if none starts.

    `url` contains a one-time code that opens the status page. The browser gets the path of a private file that forwards
    to `url`: all users of the machine can read a program's arguments, so another user could use the code first.
    """
    try:
        write_private(file, _PAGE.format(url=html.escape(url)).encode())
    except OSError as error:
        raise StorageError("The page cannot be opened.", got=f"{file}: {error.strerror}") from error
    return webbrowser.open(file.as_uri())
