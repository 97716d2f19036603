"""Portable file names."""

from __future__ import annotations

import re
from typing import Final

_DEVICE: Final = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\.|$)", re.IGNORECASE)
"""Windows device names (https://learn.microsoft.com/windows/win32/fileio/naming-a-file), with any extension."""


def is_portable_name(name: str) -> bool:
    """Return True if this is one path component that every system accepts; Windows accepts the fewest."""
    return (
        0 < len(name) <= 255
        and not name.endswith((" ", "."))
        and not any(character in '<>:"/\\|?*' or character < " " for character in name)
        and not _DEVICE.match(name)
    )
