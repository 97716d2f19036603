"""A PostgreSQL server on a socket in a temporary directory."""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


def lacking() -> str:
    """Return why this machine cannot run a PostgreSQL server; "" if it can."""
    if shutil.which("initdb") is None or shutil.which("pg_ctl") is None:
        return "no PostgreSQL server (initdb, pg_ctl) is installed"
    return "" if importlib.util.find_spec("psycopg") else "psycopg is not installed"


class PostgreSQL:
    """A PostgreSQL server with its data in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._as_server: dict[str, Any] = {}
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root.
            account = pwd.getpwnam("nobody")
            os.chown(directory, account.pw_uid, account.pw_gid)
            self._as_server = {"user": account.pw_uid, "group": account.pw_gid}
        self.url = f"postgresql://echo@/postgres?host={directory}"

    def _run(self, *command: str) -> None:
        subprocess.run(
            command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=self._directory,
            **self._as_server,
        )  # fmt: skip

    def make(self) -> None:
        """Make the data directory. Raises CalledProcessError, as `start` and `stop` do."""
        self._run("initdb", "-D", f"{self._directory}/data", "-U", "echo", "-A", "trust", "-E", "UTF8", "--no-sync")

    def start(self) -> None:
        # Autovacuum is off: it would change query plans during a measurement.
        options = f"-c listen_addresses= -c unix_socket_directories={self._directory} -c fsync=off -c autovacuum=off"
        log = f"{self._directory}/log"
        self._run("pg_ctl", "-D", f"{self._directory}/data", "-l", log, "-w", "-o", options, "start")

    @property
    def runs(self) -> bool:
        return Path(f"{self._directory}/data/postmaster.pid").exists()

    def stop(self) -> None:
        """Stop at once, as in a power cut. All connections end; the next start recovers committed data."""
        self._run("pg_ctl", "-D", f"{self._directory}/data", "-m", "immediate", "-w", "stop")


@contextmanager
def postgresql() -> Iterator[PostgreSQL]:
    with tempfile.TemporaryDirectory(prefix="echo-pg-", dir="/tmp") as directory:  # The path of a socket must be short.
        server = PostgreSQL(Path(directory))
        server.make()
        server.start()
        try:
            yield server
        finally:
            if server.runs:
                server.stop()
