"""All by whom rollouts are checked for being honest draws: the verifier, and other nodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from echo_hub.cluster.model_processes import process_of
from echo_hub.config.sections import HubConfig
from echo_hub.core.events import Event
from echo_hub.intake.episodes import load_drawn
from echo_hub.run.directory import RunDirectory
from echo_hub.serving.housekeeping import kept_steps
from echo_hub.serving.resources import Resources
from echo_hub.verify.by_nodes import NodeChecks
from echo_hub.verify.verifier import Verifier, program, verifier_settings
from echo_hub.verify.verifying import Verifying
from echo_shared.messages import FromHub

PROMPTS: Final = 256
"""Of the run's first problems, by which the rounding of engines is measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checking:
    """Made by `of`."""

    verifying: Verifying
    by_nodes: NodeChecks

    @classmethod
    def of(
        cls,
        config: HubConfig,
        directory: RunDirectory,
        opened: Resources,
        *,
        send: Callable[[str, FromHub], bool],
        report: Callable[[Event], Awaitable[None]],
    ) -> Checking:
        settings, kept = verifier_settings(config, opened.learner), config.training.max_staleness + 2
        load = partial(load_drawn, opened.store, opened.problems, run_seed=config.run.seed)
        process = None
        if config.run.mode != "colocated" and config.trust.verifier in ("process", "ray"):
            process = process_of(
                program(settings),
                settings,
                logs=directory.root / "logs",
                cluster=opened.cluster if config.trust.verifier == "ray" else None,
                kept=kept,
            )
        verifier = Verifier(
            process,
            settings,
            directory=directory,
            kept=kept,
            patience=max(1, kept_steps(config.learner) // config.training.publish_every - 1),
            load=load,
            prompts=lambda: [opened.problems.prompt_ids(number) for number in range(PROMPTS)],
        )
        return cls(
            verifying=Verifying(verifier, report=report),
            by_nodes=NodeChecks(load=load, send=send, report=report, temperature=config.sampling.temperature),
        )
