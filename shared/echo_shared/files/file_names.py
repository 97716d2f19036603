"""Check that a file name is valid on every operating system."""

from __future__ import annotations

import re
from typing import Final

_DEVICE: Final = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9¹²³]) *(\.|$)", re.IGNORECASE)
"""Names that Windows reserves for devices, with any extension
(https://learn.microsoft.com/windows/win32/fileio/naming-a-file).
"""


def is_portable_name(name: str) -> bool:
    """Return True if `name` is one path component that is valid on every system. Windows has the strictest rules."""
    return (
        0 < len(name) <= 255
        and not name.endswith((" ", "."))
        and not any(character in '<>:"/\\|?*' or character < " " for character in name)
        and not _DEVICE.match(name)
    )
