"""Construction of the verifier, which checks that rollouts are honest draws."""

from __future__ import annotations

from echo_hub.cluster.model_processes import process_of
from echo_hub.driving.shared import Shared
from echo_hub.intake.episodes import DrawnRollouts
from echo_hub.oversight.housekeeping import kept_steps
from echo_hub.verify.verifier import Verifier, program, verifier_settings
from echo_hub.verify.verifying import Verifying


def verifying_of(shared: Shared, drawn: DrawnRollouts) -> Verifying:
    """Return the verifier for the run's settings. If the settings choose no verifier process, it refuses all checks."""
    resources = shared.resources
    config, directory = resources.config, resources.directory
    settings, kept = verifier_settings(config, resources.learner), config.training.max_staleness + 2
    process = None
    if config.run.mode != "colocated" and config.trust.verifier in ("process", "ray"):
        process = process_of(
            program(settings),
            settings,
            logs=directory.root / "logs",
            cluster=resources.cluster if config.trust.verifier == "ray" else None,
            kept=kept,
        )
    verifier = Verifier(
        process,
        settings,
        directory=directory,
        kept=kept,
        patience=max(1, kept_steps(config.learner) // config.training.publish_every - 1),
        rollouts=drawn,
    )
    return Verifying(verifier, shared.queue)
