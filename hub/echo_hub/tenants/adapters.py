"""Published adapters of tenants. Each is a version with a number, a directory and users.

A version of a tenant lives while something holds it: a sampler, a saved checkpoint, or an unfinished request. After
that it is withdrawn, and its directory is deleted.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from pathlib import Path

from echo_hub.run.directory import RunDirectory
from echo_hub.store.tenant_records import VersionWithdrawn
from echo_hub.tenants.drawing import TenantDrawer
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.versions import is_of_tenant, version_directory
from echo_hub.tenants.writing import TenantWriter
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

log = logging.getLogger(__name__)


class Adapters:
    """The published versions of tenants' adapters, and what uses each of them."""

    def __init__(self, directory: RunDirectory, drawer: TenantDrawer, writer: TenantWriter) -> None:
        self._directory = directory
        self._drawer = drawer
        self._writer = writer
        self._holders: dict[int, set[str]] = {}
        self._published: dict[int, asyncio.Task[None]] = {}
        self._next = FIRST_TENANT_VERSION
        self._withdrawing: set[asyncio.Task[None]] = set()

    def begin_after(self, newest: int) -> None:
        """Give new versions only numbers above `newest`."""
        self._next = max(FIRST_TENANT_VERSION, newest + 1)

    def new_version(self) -> int:
        self._next += 1
        return self._next - 1

    def path(self, policy_version: int) -> Path | None:
        """Return the directory of a version's adapter; None for the base model. Raises Refusal if the version is
        gone."""
        if policy_version == 0:
            return None
        is_tenants = is_of_tenant(policy_version)
        root = self._directory.root
        path = version_directory(root, policy_version) if is_tenants else self._directory.adapter(policy_version)
        if not path.is_dir():
            raise Refusal(
                RefusalKind.GONE,
                "The weights of this version no longer exist.",
                got=f"version {policy_version}",
                do="Save the weights again, or use a newer version.",
            )
        return path

    async def ready(self, policy_version: int) -> None:
        """Wait until the drawer (`echo_hub.tenants.drawing`) can draw with this version. Raises Refusal if the version
        is gone."""
        path = self.path(policy_version)
        if path is None or not is_of_tenant(policy_version):
            return
        task = self._published.get(policy_version)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            task = asyncio.create_task(self._drawer.publish(policy_version, path), name=f"publish-{policy_version}")
            self._published[policy_version] = task
        await asyncio.shield(task)

    def hold(self, policy_version: int, holder: str) -> None:
        if is_of_tenant(policy_version):
            self._holders.setdefault(policy_version, set()).add(holder)

    def is_held(self, policy_version: int) -> bool:
        return policy_version in self._holders

    def release(self, policy_version: int, holder: str) -> None:
        """End the use of a version by `holder`. Unused versions are withdrawn in the background."""
        holders = self._holders.get(policy_version)
        if holders is None:
            return
        holders.discard(holder)
        if not holders:
            del self._holders[policy_version]
            self.drop(policy_version)

    def drop(self, policy_version: int) -> None:
        """Withdraw a version that nothing uses, in the background."""
        task = asyncio.create_task(self._withdraw(policy_version), name=f"withdraw-{policy_version}")
        self._withdrawing.add(task)
        task.add_done_callback(self._withdrawing.discard)

    async def close(self) -> None:
        for task in self._published.values():
            task.cancel()
        await asyncio.gather(*self._published.values(), *self._withdrawing, return_exceptions=True)

    async def _withdraw(self, policy_version: int) -> None:
        published = self._published.pop(policy_version, None)
        if published is not None:
            published.cancel()
            await asyncio.gather(published, return_exceptions=True)
            await self._drawer.withdraw(policy_version)
        await self._writer.commit(VersionWithdrawn(policy_version=policy_version, withdrawn_at=time.time()))
        path = version_directory(self._directory.root, policy_version)
        try:
            await asyncio.to_thread(shutil.rmtree, path)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("The adapter %s cannot be deleted: %s", path, error)
