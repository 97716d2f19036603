"""Which names of files every system takes."""

from __future__ import annotations

import re
from typing import Final

_DEVICE: Final = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\.|$)", re.IGNORECASE)
"""https://learn.microsoft.com/windows/win32/fileio/naming-a-file: a device, whatever follows the point."""


def is_portable_name(name: str) -> bool:
    """Whether this is one name below a directory, the same on every system; Windows takes fewer than others."""
    return (
        0 < len(name) <= 255
        and not name.endswith((" ", "."))
        and not any(character in '<>:"/\\|?*' or character < " " for character in name)
        and not _DEVICE.match(name)
    )
