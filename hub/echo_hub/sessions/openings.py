"""Problems that were drawn from environments with state, stored in a file of the run.

To draw such a problem, a session begins an episode and tells its prompt. So each problem is stored: after a restart,
and for commands that only read the run, prompts need no running environment.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from pathlib import Path
from typing import Final

from echo_hub.tasks.base import Problem
from echo_hub.tasks.environments.base import EnvironmentAway

FILE_NAME: Final = "openings.sqlite"
_BUSY_S: Final = 30.0


class Openings:
    """The problems of one task that were already drawn, in memory or in the run's file. Thread-safe. Several processes
    may use the file at once."""

    def __init__(self, directory: Path | None, task: str) -> None:
        """`task` names the task with its options. `directory` is the run's; None keeps problems in memory."""
        self._directory = directory
        self._task = task
        self._lock = threading.Lock()
        self._file: sqlite3.Connection | None = None

    def get(self, seed: int) -> Problem | None:
        rows = self._run("SELECT problem FROM openings WHERE task = ? AND seed = ?", self._task, str(seed))
        if not rows:
            return None
        told = json.loads(rows[0][0])
        return Problem(prompt=told["prompt"], metadata=told["metadata"], prompt_ids=tuple(told["prompt_ids"]))

    def put(self, seed: int, problem: Problem) -> Problem:
        """Store a problem, and return its stored form. If another process stored a problem for the seed first, return
        that one. Raises EnvironmentAway if the file cannot be written: drawing then waits."""
        told = json.dumps(
            {"prompt": problem.prompt, "metadata": dict(problem.metadata), "prompt_ids": list(problem.prompt_ids)}
        )
        self._run("INSERT OR IGNORE INTO openings VALUES (?, ?, ?)", self._task, str(seed), told)
        found = self.get(seed)
        assert found is not None, "just written"
        return found

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _run(self, command: str, *values: str) -> list[tuple[str]]:
        try:
            with self._lock, self._opened() as file:
                return file.execute(command, values).fetchall()
        except (OSError, sqlite3.OperationalError) as error:
            raise EnvironmentAway(
                "A drawn problem cannot be written down.",
                got=str(error),
                do="Free space on the run's disk, and let the hub's user write there.",
            ) from error

    def _made_place(self) -> str:
        if self._directory is None:
            return ":memory:"
        self._directory.mkdir(parents=True, exist_ok=True)
        return str(self._directory / FILE_NAME)

    def _opened(self) -> sqlite3.Connection:
        if self._file is None:
            file = sqlite3.connect(self._made_place(), timeout=_BUSY_S, check_same_thread=False)
            file.execute("PRAGMA journal_mode = WAL")
            file.execute("PRAGMA synchronous = FULL")  # Nodes sample the prompt next, so a power loss must not undo it.
            with file:
                file.execute(
                    "CREATE TABLE IF NOT EXISTS openings "
                    "(task TEXT, seed TEXT, problem TEXT NOT NULL, PRIMARY KEY (task, seed)) WITHOUT ROWID"
                )
            self._file = file
        return self._file
