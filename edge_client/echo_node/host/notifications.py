"""Notifications on the owner's desktop, if the session's D-Bus has a notification service.

https://specifications.freedesktop.org/notification-spec/1.2/
"""

from __future__ import annotations

import html
import sys
from typing import Any, Final

from echo_node.core.notices import Notice
from echo_node.host.sensors.bus import Bus

SERVICE: Final = "org.freedesktop.Notifications"
PATH: Final = "/org/freedesktop/Notifications"
URGENT: Final = ("y", 2)
"""Urgency "critical": the notification stays until the user closes it."""
MOST_SHOWN: Final = 500
"""Maximum characters of a notification's text."""


def notify(notice: Notice) -> bool:
    """Show a notification. Return False if no service shows it. Blocks the calling thread for at most two seconds."""
    if sys.platform != "linux":
        return False
    bus = Bus("SESSION")
    try:
        text = notice.text[:MOST_SHOWN]
        can = bus.call(SERVICE, PATH, SERVICE, "GetCapabilities", may_start=True)
        if can is None:
            return False
        if "body-markup" in can[0]:
            text = html.escape(text, quote=False)  # Escape markup, because the text may come from the hub.
        body: tuple[Any, ...] = ("echo-node", 0, "", notice.title, text, [], {"urgency": URGENT}, -1)
        return bus.call(SERVICE, PATH, SERVICE, "Notify", "susssasa{sv}i", body) is not None
    finally:
        bus.close()
