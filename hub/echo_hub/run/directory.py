"""The directory of one run: what lies where, and that only one hub at a time works in it."""

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

log = logging.getLogger(__name__)

_FORGOTTEN: Final = ".forgotten-"
LEAST_KEPT: Final = 3
"""Newest adapters, however large they are."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """Paths below one run's root."""

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
        """What scripts show to be let in as the operator; secret."""
        return self.root / "operator.token"

    @property
    def operator_password(self) -> Path:
        """The hash of the password that the operator has set, if any."""
        return self.root / "operator.password"

    @property
    def artefacts(self) -> Path:
        """What is published: `echo_hub.net.artefact_store`."""
        return self.root / "artefacts"

    @property
    def database_url(self) -> str:
        """The address of the run's own SQLite database."""
        from sqlalchemy import URL  # Learner and verifier know the directory and no database.

        path = (self.root.resolve() / "echo.db").as_posix()
        return URL.create("sqlite", database=path).render_as_string()

    @property
    def start(self) -> Path:
        """What the run starts with, if not with the bare base: `echo_hub.run.start`."""
        return self.root / "start"

    def checkpoint(self, step: int) -> Path:
        """What the learner goes on with behind this step: `echo_hub.learner.checkpoint`."""
        return self.root / "checkpoints" / f"step-{step:06d}"

    def adapter(self, policy_version: int) -> Path:
        """A published version in PEFT's layout, as the learner wrote it."""
        return self.root / "adapters" / f"v{policy_version:06d}"

    def adapter_versions(self) -> list[int]:
        """The versions that `adapter` has, oldest first."""
        paths = (self.root / "adapters").glob("v*[0-9]")
        return sorted(int(path.name[1:]) for path in paths if path.name[1:].isdecimal())

    def trained(self, *, started_with: int = 0) -> list[Path]:
        """What its learner has left here: the newest checkpoint, the newest adapter. Empty before the first step.
        `started_with`: the version that it was given."""
        checkpoints = sorted((self.root / "checkpoints").glob("step-*"))
        adapters = [self.adapter(version) for version in self.adapter_versions()]
        given = {self.checkpoint(started_with), self.adapter(started_with)}
        return [path for path in (*checkpoints[-1:], *adapters[-1:]) if path not in given]

    def forget_adapters(
        self, *, kept: int, max_bytes: int, published_version: int, evaluating: Collection[int]
    ) -> None:
        """Deletes all but the newest `kept` adapters, or fewer that take `max_bytes` together (0 = no bound) and are
        `LEAST_KEPT` at least. Never `published_version`, what is yet to be published, or what is yet to be evaluated.

        An adapter vanishes as a whole. What the system does not let go of is logged and tried again the next time.
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
        """So many of the newest adapters fit."""
        left = max_bytes or inf
        for number, version in enumerate(reversed(versions)):
            left -= sum(path.stat().st_size for path in self.adapter(version).glob("*"))
            if left < 0:
                return max(number, LEAST_KEPT)
        return max(len(versions), LEAST_KEPT)

    def check(self) -> None:
        """Raises ConfigError unless `echo-hub init` has made this directory."""
        if not self.config.is_file():
            raise ConfigError(
                "This is not a run directory.",
                got=f"{self.root} (no config.toml)",
                do=f"Make one: echo-hub init {self.root}",
            )

    def check_unlocked(self) -> None:
        """Raises StorageError while another process has locked it."""
        with self.locked():
            pass

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Locks the directory for the hub process; the system frees it when that dies. Raises StorageError when another
        holds it."""
        lock = FileLock(self.root / "hub.lock")
        try:
            lock.acquire(timeout=0)
        except Timeout as error:
            raise StorageError(
                "Another hub is working in this run directory, or `echo-hub sft`.",
                got=str(self.root),
                do="Stop that hub, or that training, first, or make a new run: echo-hub init OTHER_DIRECTORY",
            ) from error
        except OSError as error:
            raise StorageError(
                "The run directory cannot be written.", got=str(error), do="Check its owner and free space."
            ) from error
        try:
            yield
        finally:
            lock.release()
