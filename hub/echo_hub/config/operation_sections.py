"""Settings of what a hub says of itself: its log, and the alerts that it sends."""

from __future__ import annotations

from typing import Annotated, Final, Literal, get_args

from pydantic import AfterValidator, Field, model_validator

from echo_hub.config.section import Port, Section
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
    """The hub's log RUN/logs/hub.log, one JSON object a line, and the events in its database. May change between two
    starts."""

    level: LogLevel = "info"
    """Lowest level in hub.log: debug, info, warning or error."""
    max_bytes: Annotated[int, Field(ge=10_000)] = 10_000_000
    """Size at which hub.log becomes hub.log.1, and hub.log.1 becomes hub.log.2."""
    kept: Annotated[int, Field(ge=1, le=100)] = 4
    """Number of older files that stay."""
    events_kept: Annotated[int, Field(ge=100, le=100_000)] = 2_000
    """Newest events of each kind that the database keeps, for the page's log and `echo-hub events`."""


_SPECIAL: Final = frozenset(' <>,;:"()[]\\')


def _is_address(text: str) -> str:
    name, _, host = text.partition("@")
    is_plain = text.isascii() and text.isprintable() and not set(text) & _SPECIAL
    if not name or not host or "@" in host or not is_plain:
        raise ValueError("must be an e-mail address, such as ada@example.org")
    return text


Address = Annotated[str, AfterValidator(_is_address), Field(max_length=254)]


class AlertsConfig(Section):
    """Who is told when something needs an operator, and when it does not any more: by a webhook, by e-mail, or both.
    `echo-hub alert-test RUN` sends one. With neither set nobody is; the page shows the same."""

    webhook_url: Annotated[SecretText, Field(pattern=r"^(https?://[^\s/]+\S*)?$", max_length=2_000)] = ""
    """Each alert is posted there as JSON (docs/operator/operation.md). The address may hold a secret: it is in no
    log."""
    webhook_secret: Annotated[SecretText, Field(pattern=r"^(.{16,256})?$")] = ""
    """At least 16 characters: what is posted is signed with it, by HMAC-SHA256 in the header Echo-Signature."""
    email_to: tuple[Address, ...] = ()
    """Who gets each alert by e-mail."""
    email_from: str = ""
    """The sender's address."""
    smtp_host: str = ""
    """The server that takes the e-mail."""
    smtp_port: Port = 587
    """587 is usual for starttls, 465 for tls, 25 for none."""
    smtp_security: Literal["starttls", "tls", "none"] = "starttls"
    """starttls: the connection must turn to TLS before anything is said. tls: it speaks TLS from the start. none: no
    TLS; with a password on this machine's own address alone."""
    smtp_user: str = ""
    """Empty = without logging in."""
    smtp_password: SecretText = ""
    """Better in the environment: ECHO_HUB_ALERTS__SMTP_PASSWORD."""
    kinds: tuple[AlertKind, ...] = ()
    """What is told of, by its name in docs/operator/operation.md; empty = everything. All problems are on the page
    and among the events, whatever this says."""
    learner_idle_s: Annotated[float, Field(ge=0)] = 600.0
    """Seconds of waiting for rollouts before an alert; 0 = off."""
    learner_idle_share: Annotated[float, Field(ge=0, le=1)] = 0.8
    """Share of idle time over the newest steps that also triggers this alert; 0 = off."""
    no_nodes_s: Annotated[float, Field(ge=0)] = 300.0
    """Seconds without a connected node, while the run needs some, before an alert; 0 = off."""
    reward_fell: Annotated[float, Field(ge=0, le=10)] = 0.5
    """Share of the best 16 steps' gain in mean reward that 16 steps may lose before an alert, beyond chance; 0 =
    off."""
    disk_free_bytes: Annotated[int, Field(ge=0)] = 2_000_000_000
    """Free bytes on the run directory's disk below which an alert is sent; 0 = off."""
    quarantined_in_an_hour: Annotated[int, Field(ge=0)] = 3
    """Nodes quarantined within an hour that count as an attack; 0 = off."""
    turned_away_per_s: Annotated[float, Field(ge=0)] = 50.0
    """Connections, nodes and frames turned away each second, over a minute, that count as an attack; 0 = off."""
    repeat_s: Annotated[float, Field(ge=0)] = 3_600.0
    """Shortest time before the same problem is sent again."""
    per_hour: Annotated[int, Field(ge=1, le=1_000)] = 20
    """Most alerts in an hour. Further alerts are held back, and the next one states their number."""

    @model_validator(mode="after")
    def _fits_together(self) -> AlertsConfig:
        if self.webhook_secret and not self.webhook_url:
            raise ValueError("webhook_secret is of no use without webhook_url: set it, or remove the secret")
        if self.email_to:
            if not self.smtp_host or not self.email_from:
                raise ValueError("email_to needs smtp_host and email_from")
            _is_address(self.email_from)
        if bool(self.smtp_user) != bool(self.smtp_password):
            raise ValueError("smtp_user and smtp_password belong together: set both, or neither")
        if self.smtp_password and self.smtp_security == "none" and self.smtp_host not in ("localhost", "127.0.0.1"):
            raise ValueError('smtp_security must be "starttls" or "tls" with a password: it would be sent in the open')
        return self

    @property
    def told_of(self) -> tuple[AlertKind, ...]:
        """The kinds that are."""
        return self.kinds or get_args(AlertKind)


class MetricsConfig(Section):
    """Destinations of the run's curves besides the hub's own pages. Their failures never stop a run. May change between
    two starts."""

    tensorboard: bool = True
    """Write event files to RUN/tensorboard."""
    wandb: Literal["off", "offline", "online"] = "off"
    """Weights & Biases (extra `wandb`). offline: write to RUN/wandb, for `wandb sync`. online: upload to the account of
    `wandb login` or WANDB_API_KEY: figures, histograms and the run's settings without the section [server]."""
    wandb_project: Annotated[str, Field(min_length=1, max_length=128)] = "echo"
    """Project name at W&B."""
    wandb_entity: Annotated[str, Field(max_length=128)] = ""
    """User or team at W&B; empty = the account's own."""
    texts: Annotated[int, Field(ge=0, le=64)] = 0
    """Prompts and completions of a step that are sent there too, from groups that keeping.share chooses; 0 = none. With
    wandb = "online" they leave this machine."""
    texts_every: Annotated[int, Field(ge=1)] = 10
    """Steps between such texts."""
    node_series: bool = False
    """Add a dozen series of each node to /metrics, for fleets of up to some hundreds."""
