"""Paths inside a run directory, and its lock: only one hub at a time works in it."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Final

from filelock import FileLock, Timeout

from echo_shared.errors import ConfigError, StorageError
from echo_shared.wire.messages.fields import FIRST_TENANT_VERSION

log = logging.getLogger(__name__)

_FORGOTTEN: Final = ".forgotten-"
LEAST_KEPT: Final = 3
"""Smallest number of newest adapters that are kept, even if they exceed the size limit."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    root: Path

    @property
    def config(self) -> Path:
        return self.root / "config.toml"

    @property
    def key(self) -> Path:
        return self.root / "hub.key"

    @property
    def run_keys(self) -> Path:
        return self.root / "run_keys.json"

    @property
    def operator_token(self) -> Path:
        """Return the path of the secret token with which scripts authenticate as the operator."""
        return self.root / "operator.token"

    @property
    def operator_password(self) -> Path:
        """Return the path of the file with the password's hash. The file is missing if there is no password."""
        return self.root / "operator.password"

    @property
    def artefacts(self) -> Path:
        """Return the directory of published files, which `echo_hub.net.artefact_store` manages."""
        return self.root / "artefacts"

    @property
    def gguf(self) -> Path:
        """Return the path of the description of the offered GGUF file (`echo_hub.run.offered_gguf`)."""
        return self.root / "gguf.json"

    @property
    def database_url(self) -> str:
        from sqlalchemy import URL  # Import here: learner and verifier use this class without a database.

        path = (self.root.resolve() / "echo.db").as_posix()
        return URL.create("sqlite", database=path).render_as_string()

    @property
    def start(self) -> Path:
        """Return the directory of the run's initial adapter (`echo_hub.run.start`). It is missing if the run starts
        with the bare base.
        """
        return self.root / "start"

    def checkpoint(self, step: int) -> Path:
        """Return the path of the checkpoint from which the learner resumes after this step:
        `echo_hub.learner.checkpoint`."""
        return self.root / "checkpoints" / f"step-{step:06d}"

    def adapter(self, policy_version: int) -> Path:
        """Return the directory of a published version, of the run or of a tenant, in the PEFT layout that the learner
        wrote."""
        if policy_version >= FIRST_TENANT_VERSION:
            return self.root / "tenants" / "versions" / f"v{policy_version}"
        return self.root / "adapters" / f"v{policy_version:06d}"

    def adapter_versions(self) -> list[int]:
        paths = (self.root / "adapters").glob("v*[0-9]")
        return sorted(int(path.name[1:]) for path in paths if path.name[1:].isdecimal())

    def trained(self, *, started_with: int = 0) -> list[Path]:
        """Return the newest checkpoint and the newest adapter that this run has trained; empty before the first step.

        The files of `started_with`, the version with which the run began, are left out.
        """
        checkpoints = sorted((self.root / "checkpoints").glob("step-*"))
        adapters = [self.adapter(version) for version in self.adapter_versions()]
        given = {self.checkpoint(started_with), self.adapter(started_with)}
        return [path for path in (*checkpoints[-1:], *adapters[-1:]) if path not in given]

    def forget_adapters(
        self, *, kept: int, max_bytes: int, published_version: int, evaluating: Collection[int]
    ) -> None:
        """Delete old adapters.

        Keeps the newest `kept` adapters. If these exceed `max_bytes` in total (0 = no limit), keeps fewer, but at least
        `LEAST_KEPT`. Never deletes `published_version`, newer versions, or versions that must still be evaluated. An
        adapter is renamed first, so that it disappears atomically. If the system refuses a deletion, the failure is
        logged, and the next call tries again.
        """
        versions = self.adapter_versions()
        spare = versions[: -min(kept, self._fitting(versions, max_bytes))]
        old = [version for version in spare if version < published_version and version not in evaluating]
        left_over = (self.root / "adapters").glob(f"{_FORGOTTEN}*")
        for path in [*left_over, *map(self.adapter, old)]:
            try:
                if not path.name.startswith(_FORGOTTEN):
                    path = path.rename(path.with_name(_FORGOTTEN + path.name))
                shutil.rmtree(path)
            except OSError as error:
                log.warning("The old adapter %s cannot be deleted now: %s", path, error)

    def _fitting(self, versions: Sequence[int], max_bytes: int) -> int:
        left = max_bytes or inf
        for number, version in enumerate(reversed(versions)):
            left -= sum(path.stat().st_size for path in self.adapter(version).glob("*"))
            if left < 0:
                return max(number, LEAST_KEPT)
        return max(len(versions), LEAST_KEPT)

    def check(self) -> None:
        """Raise ConfigError unless `echo-hub init` created this directory."""
        if not self.config.is_file():
            raise ConfigError(
                "This is not a run directory.",
                got=f"{self.root} (no config.toml)",
                do=f"Create one: echo-hub init {self.root}",
            )

    def check_unlocked(self) -> None:
        """Raise StorageError if another process holds the lock."""
        with self.locked():
            pass

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory for this process; the system frees the lock if the process dies.

        Raises StorageError if another process holds the lock.
        """
        lock = FileLock(self.root / "hub.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise StorageError(
                "Another hub, or `echo-hub sft`, is using this run directory.",
                got=str(self.root),
                do="Stop that process first, or create a new run: echo-hub init OTHER_DIRECTORY",
            ) from error
        except OSError as error:
            raise StorageError(
                "The run directory cannot be written.", got=str(error), do="Check its owner and free space."
            ) from error
        try:
            yield
        finally:
            lock.release()
