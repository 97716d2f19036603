"""Memory left under the limits of this process's Linux control groups, which containers and services have.

https://docs.kernel.org/admin-guide/cgroup-v2.html#memory and cgroup-v1/memory.html
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from echo_node.host.sensors.sysfs import text_of

GROUPS: Final = Path("/sys/fs/cgroup")
OWN: Final = Path("/proc/self/cgroup")
_NO_LIMIT: Final = 2**60
"""Limits of this many bytes or more mean "no limit": version 1 of control groups writes such a number for it."""


def left_bytes(groups: Path = GROUPS, own: Path = OWN) -> int | None:
    """Return the bytes left under the strictest limit of this process's groups, None without a limit. File caches count
    as free.

    `groups`: mount point of the groups; `own`: the file that names this process's groups.
    """
    found = (_left(place, *names) for place, names in _places(groups, own))
    return min((left for left in found if left is not None), default=None)


_VERSION_2: Final = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_VERSION_1: Final = (
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
_Names = tuple[str, str, tuple[str, ...]]


def _places(groups: Path, own: Path) -> Iterator[tuple[Path, _Names]]:
    """Yield the directories of this process's groups and of their parents."""
    for line in text_of(own).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            mounts, names = [groups, groups / "unified"], _VERSION_2
        elif "memory" in controllers.split(","):
            mounts, names = [groups / "memory"], _VERSION_1
        else:
            continue
        for mount in mounts:
            place = mount / path.lstrip("/")
            # In a container, this path may exist only on the host. The mount point itself is then the group's
            # directory.
            place = place if place.is_dir() else mount
            for group in (place, *place.parents):
                if group == mount or mount in group.parents:
                    yield group, names


def _left(place: Path, limit: str, used: str, caches: tuple[str, ...]) -> int | None:
    most, now = text_of(place / limit), text_of(place / used)
    if not (most.isdecimal() and now.isdecimal()) or int(most) >= _NO_LIMIT:
        return None
    stats = dict(line.partition(" ")[::2] for line in text_of(place / "memory.stat").splitlines())
    cached = sum(int(stats[name]) for name in caches if stats.get(name, "").isdecimal())
    return max(0, int(most) - int(now) + cached)
