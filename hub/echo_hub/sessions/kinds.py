"""Kinds of environments with state, by the beginning of their task's name, and how the sessions of each run.

    textarena:GuessTheNumber-v0    a fork for each session, in the interpreter that has textarena
    openenv:ws://HOST:PORT/ws      one process for all sessions, in the hub's interpreter
    verifiers:demo-env             all in one process, in the interpreter that has verifiers and the package
    python:MODULE:FUNCTION         a fork for each session, in the hub's interpreter

A kind declares what the hub must know of the environment before its process runs, such as the bounds of rewards.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol, Self

from echo_hub.config.sections import HubConfig
from echo_hub.config.sessions_section import SessionsConfig
from echo_hub.run.base_model import PromptCodec
from echo_hub.sessions import caging
from echo_hub.sessions.adapters.openenv_options import OpenEnvOptions
from echo_hub.sessions.adapters.textarena import TextArenaOptions
from echo_hub.sessions.adapters.verifiers import VerifiersOptions
from echo_hub.sessions.openings import Openings
from echo_hub.sessions.process import ProcessEnvironment
from echo_hub.sessions.program_process import PROGRAM, ProgramLaunch, ProgramPlan, SessionProcess, bare
from echo_hub.tasks.base import Task
from echo_hub.tasks.environments.base import AnyEnvironment, Environment
from echo_hub.tasks.registry import make_task
from echo_shared.cage.session_terms import Children

ATTRIBUTES: Final = (
    *("replay", "verify_first", "max_turns", "isolated", "reward_if_lost"),
    *("reward_bounds", "component_bounds", "component_weights", "tools"),
)
"""Attributes that an environment may declare."""


class DeclaringOptions(Protocol):
    """What a kind's options must offer: they are a frozen pydantic model (`echo_hub.tasks.options.TaskOptions`)."""

    @classmethod
    def read(cls, task: str, options: Mapping[str, Any]) -> Any:
        """Validate the options of the task. Some kinds need the task's name for that. Raises ConfigError."""

    @property
    def declared(self) -> Mapping[str, Any]:
        """Attributes of the environment that the hub must know, from `ATTRIBUTES`."""

    @property
    def variables(self) -> Sequence[str]:
        """Names of the hub's environment variables that the environment's process gets."""

    def model_dump(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentKind:
    """How environments of a kind run."""

    adapter: str
    """`MODULE:FACTORY` of the adapter; see `echo_hub.sessions.inside.calls`."""
    way: Literal["fork", "shared"]
    is_foreign: bool
    """True if the adapter runs in `sessions.python`, which need not have Echo's packages."""
    options: type[DeclaringOptions]
    children: Children | None = "forks"
    """What child processes the adapter's process may start in its cage. None: the process runs only Echo's code,
    without a cage."""


KINDS: Final[Mapping[str, EnvironmentKind]] = {
    # Its sessions only talk to a server, so they share a process.
    "openenv": EnvironmentKind(
        adapter="echo_hub.sessions.adapters.openenv_program:make",
        way="shared",
        is_foreign=False,
        options=OpenEnvOptions,
        children=None,
    ),
    "textarena": EnvironmentKind(
        adapter="echo_hub.sessions.inside.textarena_game:make", way="fork", is_foreign=True, options=TextArenaOptions
    ),
    "verifiers": EnvironmentKind(
        adapter="echo_hub.sessions.inside.verifiers_server:make",
        way="shared",
        is_foreign=True,
        options=VerifiersOptions,
        children="programs",
    ),
}
"""Kinds by the part of the task's name before its first colon."""
OWN_ADAPTER: Final = "echo_hub.sessions.own_environment:make"


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionPlace:
    """What environments with state must know about the run."""

    config: SessionsConfig = SessionsConfig()  # noqa: RUF009
    key: str = ""
    """Key of the task in the run's mixture; "" if the run has one task."""
    base_dir: Path | None = None
    """Directory of the base model."""
    run_dir: Path | None = None
    """Directory of the run. None: nothing is stored."""
    context_tokens: int = 0
    stop_ids: Sequence[int] = ()
    max_tokens: int = 0
    temperature: float = 1.0
    vocabulary: int = 0
    """Number of the base model's token ids."""

    @classmethod
    def of_run(cls, config: HubConfig, codec: PromptCodec, *, base_dir: Path | None, run_dir: Path | None) -> Self:
        """Return the place for a run's environments. `codec` tokenizes prompts for the base model."""
        return cls(
            config=config.sessions,
            base_dir=base_dir,
            run_dir=run_dir,
            context_tokens=codec.context_tokens,
            stop_ids=codec.stop_ids,
            max_tokens=config.sampling.max_tokens,
            temperature=config.sampling.temperature,
            vocabulary=codec.num_model_ids,
        )


def make_any_task(name: str, options: Mapping[str, Any], place: SessionPlace) -> Task | AnyEnvironment:
    """Create a task without state, as `make_task` does, or an environment with state. Its process starts when it is
    first needed. Raises ConfigError for an unknown name or invalid options."""
    head = name.partition(":")[0]
    if (kind := KINDS.get(head)) is not None:
        read = kind.options.read(name, options)
        return _in_process(
            name,
            adapter=kind.adapter,
            way=kind.way,
            python=place.config.python if kind.is_foreign else "",
            options=read.model_dump(),
            declared=read.declared,
            place=place,
            children=kind.children,
            variables=read.variables,
        )
    task = make_task(name, options)
    if not isinstance(task, Environment):
        return task
    declared = {attribute: getattr(task, attribute) for attribute in ATTRIBUTES if hasattr(task, attribute)}
    return _in_process(
        name,
        adapter=OWN_ADAPTER,
        way="fork",
        python="",
        options=options,
        declared=declared,
        place=place,
        reads=_folders_of(name),
    )


def _folders_of(name: str) -> list[Path]:
    """Return the folder that contains the module of a task `python:MODULE:FUNCTION`."""
    found = importlib.util.find_spec(name.split(":")[1].partition(".")[0])
    if found is None or found.origin is None:
        return []
    file = Path(found.origin)
    return [file.parent.parent if found.submodule_search_locations else file.parent]


def _in_process(
    name: str,
    *,
    adapter: str,
    way: Literal["fork", "shared"],
    python: str,
    options: Mapping[str, Any],
    declared: Mapping[str, Any],
    place: SessionPlace,
    children: Children | None = "forks",
    reads: Sequence[Path] = (),
    variables: Sequence[str] = (),
) -> ProcessEnvironment:
    digest = hashlib.blake2b(json.dumps([name, options], sort_keys=True).encode(), digest_size=8).hexdigest()
    folder = None if place.run_dir is None else place.run_dir / "sessions"
    plan = ProgramPlan(
        way=way,
        adapter=adapter,
        python=python,
        options=options,
        variables=variables,
        memory_mb=place.config.memory_mb,
        # Include the task's key: two tasks of a mixture may differ only in their prompts, and each process empties its
        # directory when it ends.
        directory=None if folder is None else folder / digest / place.key,
        launch=bare if children is None else _launch(name, place, children, reads),
        log=None if folder is None else folder / f"{digest}.log",
        place={
            "task": name,
            "sessions": place.config.model_dump(),
            "hidden": [] if place.run_dir is None else [str(place.run_dir.resolve())],
            "base": "" if place.base_dir is None else str(place.base_dir),
            "context_tokens": place.context_tokens,
            "stop_ids": list(place.stop_ids),
            "max_tokens": place.max_tokens,
            "temperature": place.temperature,
            "vocabulary": place.vocabulary,
        },
    )
    return ProcessEnvironment(
        name,
        SessionProcess(plan),
        openings=Openings(folder, f"{name} {digest}"),
        declared=declared,
        drawing_s=place.config.open_timeout_s,
    )


def _launch(name: str, place: SessionPlace, children: Children, reads: Sequence[Path]) -> ProgramLaunch:
    """Return the function that wraps the command of the environment's process in its cage."""
    given = [*reads, *(one for one in (place.base_dir, PROGRAM.parent) if one is not None)]
    hidden = [] if place.run_dir is None else [place.run_dir]

    def launch(command: Sequence[str], directory: Path, /) -> Sequence[str]:
        python, *program = command
        terms = caging.terms_of(place.config, directory=directory, hidden=hidden, reads=given, children=children)
        return caging.command(python, program, terms, environment=name, config=place.config)

    return launch
