"""Settings of the hub's log, alerts, and exported metrics."""

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
    "verifier_away",
    "evaluator_away",
    "finished",
]
LogLevel = Literal["debug", "info", "warning", "error"]


class LogConfig(Section):
    """The hub's log, RUN/logs/hub.log: one JSON object a line. May be changed between two starts."""

    level: LogLevel = "info"
    """Lowest level that hub.log has: debug, info, warning or error."""


class AlertsConfig(Section):
    """Thresholds of problems that need an operator, and the webhook that gets an alert when a problem begins or ends.
    `echo-hub alert-test RUN` sends a test. The page and `/metrics` show the same problems without a webhook."""

    webhook_url: Annotated[SecretText, Field(pattern=r"^(https?://[^\s/]+\S*)?$", max_length=2_000)] = ""
    """Each alert is posted there as JSON (docs/operator/operation.md). The address may hold a secret: it is in no
    log."""
    webhook_secret: Annotated[SecretText, Field(pattern=r"^(.{16,256})?$")] = ""
    """Signs each post, by HMAC-SHA256 in the header Echo-Signature. It needs at least 16 characters."""
    kinds: tuple[AlertKind, ...] = ()
    """Kinds of problems that the webhook gets, by their names in docs/operator/operation.md; empty = all. The page, the
    events and /metrics always have all problems."""
    learner_idle_s: Annotated[float, Field(ge=0)] = 600.0
    """Seconds for which the learner must wait for rollouts until this is a problem; 0 = never a problem."""
    disk_free_bytes: Annotated[int, Field(ge=0)] = 2_000_000_000
    """Free bytes on the run directory's disk below which there is a problem; 0 = never a problem."""

    @model_validator(mode="after")
    def _fits_together(self) -> AlertsConfig:
        if self.webhook_secret and not self.webhook_url:
            raise ValueError("webhook_secret has no effect without webhook_url: set it, or remove the secret")
        return self

    @property
    def told_of(self) -> tuple[AlertKind, ...]:
        """Kinds of alerts that the webhook gets."""
        return self.kinds or get_args(AlertKind)


class MetricsConfig(Section):
    """Other programs that get the run's curves, next to the hub's own pages. Their failures never stop a run. May be
    changed between two starts."""

    tensorboard: bool = True
    """Write event files to RUN/tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases (extra `wandb`). offline: write to RUN/wandb, for `wandb sync`. online: upload to the account of
    `wandb login` or WANDB_API_KEY: figures, histograms and the run's settings without the section [server]. The
    environment names project and team: WANDB_PROJECT (else "echo") and WANDB_ENTITY."""
    texts: Annotated[int, Field(ge=0, le=64)] = 0
    """Number of prompts and completions of every tenth step that TensorBoard and W&B get, out of the groups that
    keeping.share chooses; 0 = none. With wandb = "online" these texts leave this machine."""
    node_series: bool = False
    """/metrics has a dozen series for each node, next to the sums: for fleets of up to some hundreds of nodes."""
