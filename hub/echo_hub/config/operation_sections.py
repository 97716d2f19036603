"""Settings of the hub's log, of its alerts, and of metrics for other programs."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, model_validator

from echo_hub.config.section import Section
from echo_shared.settings import SecretText

AlertKind = Literal[
    "learner_down",
    "disk_full",
    "database_away",
    "learner_idle",
    "no_nodes",
    "reward_fell",
    "disk",
    "attack",
    "version_withdrawn",
    "node_lags",
    "common_fault",
    "judge_away",
    "scorers_away",
    "environment_away",
    "slots_short",
    "verifier_away",
    "evaluator_away",
    "finished",
]
LogLevel = Literal["debug", "info", "warning", "error"]


class LogConfig(Section):
    """The hub's log, RUN/logs/hub.log: one JSON object per line. May change between two starts."""

    level: LogLevel = "info"
    """Lowest level in hub.log: debug, info, warning or error."""


class AlertsConfig(Section):
    """Thresholds of problems that need an operator, and the webhook that gets an alert when a problem begins or ends.
    `echo-hub alert-test RUN` sends a test. Without a webhook, the page and `/metrics` still show the same problems."""

    webhook_url: Annotated[SecretText, Field(pattern=r"^(https?://[^\s/]+\S*)?$", max_length=2_000)] = ""
    """Each alert is posted to this address as JSON (docs/operator/operation.md). The address may hold a secret, so no
    log contains it."""
    webhook_secret: Annotated[SecretText, Field(pattern=r"^(.{16,256})?$")] = ""
    """Secret that signs each post, by HMAC-SHA256 in the header Echo-Signature. At least 16 characters."""
    kinds: tuple[AlertKind, ...] = ()
    """Kinds of problems that the webhook gets, by their names in docs/operator/operation.md; empty = all kinds. The
    page, the events and /metrics always have all problems."""
    learner_idle_s: Annotated[float, Field(ge=0)] = 600.0
    """Seconds for which the learner must wait for rollouts until the hub reports a problem; 0 = never."""
    disk_free_bytes: Annotated[int, Field(ge=0)] = 2_000_000_000
    """Free bytes on the run directory's disk below which the hub reports a problem; 0 = never."""

    @model_validator(mode="after")
    def _fits_together(self) -> AlertsConfig:
        if self.webhook_secret and not self.webhook_url:
            raise ValueError("webhook_secret has no effect without webhook_url: set it, or remove the secret")
        return self

    @property
    def told_of(self) -> tuple[AlertKind, ...]:
        """Kinds of alerts that the webhook gets: `kinds`, or all kinds if it is empty."""
        return self.kinds or get_args(AlertKind)


class MetricsConfig(Section):
    """Other programs that get the run's curves, in addition to the hub's own pages. Their failures never stop a run.
    May change between two starts."""

    tensorboard: bool = True
    """Write event files to RUN/tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases (extra `wandb`). offline: write to RUN/wandb, for `wandb sync`. online: upload figures,
    histograms and the run's settings without the section [server] to the account of `wandb login` or WANDB_API_KEY. The
    environment names the project and the team: WANDB_PROJECT (default "echo") and WANDB_ENTITY."""
    texts: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of prompts, each with its completions, of every tenth step that TensorBoard and W&B get. They come from
    the groups that keeping.share keeps; 0 = none. With wandb = "online", these texts leave this machine."""
    node_series: bool = False
    """If True, /metrics has a dozen series for each node, in addition to the sums over all nodes. Use it only with at
    most some hundreds of nodes."""
