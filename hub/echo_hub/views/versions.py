"""Views of the published versions, and of the progress of the newest version on its way to the nodes."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Final

from echo_hub.dashboard.model import DisseminationView, VersionView
from echo_hub.run.directory import RunDirectory
from echo_hub.spread.holdings import VersionProgress
from echo_hub.store.store import Store

VERSIONS_SHOWN: Final = 30
SIZES_KEPT: Final = 1_024


class VersionViews:
    """Reads versions from the database. The size of each version's adapter is read only once."""

    def __init__(self, store: Store, directory: RunDirectory) -> None:
        self._store = store
        self._size_bytes = lru_cache(SIZES_KEPT)(lambda version: _size_bytes(directory.adapter(version)))

    def read(self) -> tuple[VersionView, ...]:
        newest = reversed(self._store.versions_history(VERSIONS_SHOWN))
        return tuple(VersionView(record=row, size_bytes=self._size_bytes(row.policy_version)) for row in newest)


def dissemination_view(progress: VersionProgress) -> DisseminationView:
    release = progress.release
    return DisseminationView(
        policy_version=release.policy_version,
        carrier=release.carrier,
        way=release.way.value if release.way else "shared_memory",
        size_bytes=release.adapter_bytes,
        payload_bytes=release.payload_bytes,
        since_s=progress.since_s,
        num_told=progress.num_told,
        num_reached=len(progress.seconds),
        share_arrived=progress.share_arrived,
    )


def _size_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*") if path.is_file())
