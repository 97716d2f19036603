"""Settings of the Tinker API, of the OpenAI-compatible API, and of their tenants."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from echo_hub.config.section import Section

ModelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_./-]{0,127}$")]
"""Name of a model for clients. It must not contain a colon, because clients of the Tinker API split names at colons."""
OWN_NAME: Final = "base"
"""Name of the run's base model for clients, in addition to the aliases."""


class TinkerConfig(Section):
    """The Tinker API at /tinker/api/v1. Programs written for the package `tinker` train adapters of their own on this
    run's base model. Each needs a token with the scope use: echo-hub act RUN token NAME scope=use."""

    enabled: bool = False
    """Serve the Tinker API."""
    aliases: Annotated[dict[ModelName, Literal["base"]], Field(max_length=64)] = Field(default_factory=dict)
    """Further names of the base model for clients of both APIs (Tinker and OpenAI), such as {"Qwen/Qwen3-8B" = "base"}.
    A client loads its tokenizer by this name. So use the real name of the served model, unless the client has the
    served model's tokenizer in a directory of that name."""


class OpenAiConfig(Section):
    """The OpenAI-compatible API at /v1, for sampling. Each program needs a token with the scope use: echo-hub act RUN
    token NAME scope=use."""

    enabled: bool = False
    """Serve the OpenAI-compatible API."""


class TenantsConfig(Section):
    """Tenants: the owners of tokens with the scope use. The limits hold for each tenant. They may change between two
    starts, and `echo-hub act RUN tenant_quota` changes them for one tenant."""

    drawn_by: Literal["nodes", "hub"] = "nodes"
    """Which machines sample for tenants. nodes: the nodes of the run. Tenants' prompts then go to machines of people
    whom the operator may not know. hub: only the hub's own device.
    """
    prompt_logprobs_by: Literal["hub", "nodes"] = "hub"
    """Which machines compute the log-probabilities of prompts' tokens. nodes: two trusted nodes of different owners;
    the hub computes them if the two disagree or cannot. hub: only the hub's own device. Top-k values always come from
    the hub's device.
    """
    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    """Device of the process that holds tenants' models: auto, cpu, cuda, cuda:1, mps. It has a copy of the base model
    of its own. Choose another device than the learner's if the base model does not fit there twice."""
    tokens_per_day: Annotated[int, Field(ge=0)] = 0
    """Tokens that a tenant may sample and train on in a day (UTC), prompts included; 0 = no limit. When they are used
    up, the hub refuses further requests of this tenant until the next day."""
    max_queued: Annotated[int, Field(ge=1, le=1_000_000)] = 4_096
    """Number of one tenant's requests that may wait or run at once. Further requests are refused, and clients send them
    again."""
    max_models: Annotated[int, Field(ge=1, le=10_000)] = 16
    """Number of models that one tenant may have in training at once, over all its open sessions."""
    max_rank: Annotated[int, Field(ge=1, le=1024)] = 64
    """Largest rank of a tenant's adapter."""
    max_checkpoint_bytes: Annotated[int, Field(ge=0)] = 10_000_000_000
    """Disk space of one tenant's saved weights together, in bytes; 0 = no limit. At this limit, a tenant must
    delete weights before it saves more."""
    max_result_bytes: Annotated[int, Field(ge=0)] = 4_000_000_000
    """Disk space of one tenant's stored results together, in bytes; 0 = no limit. At this limit, the hub refuses more
    requests until results are deleted: `result_kept_s` after they were read, or `unread_result_kept_s` after their end.
    """
    checkpoint_every: Annotated[int, Field(ge=1, le=10_000)] = 10
    """Optimizer steps between two checkpoints of a model. If the process that holds the models is killed, the hub
    repeats the steps after the newest checkpoint."""
    session_expires_s: Annotated[float, Field(ge=60, le=604_800)] = 1_800.0
    """Seconds without a message from its client after which a session ends. Its models and unnamed versions are then
    deleted; saved weights stay."""
    result_kept_s: Annotated[float, Field(ge=60, le=604_800)] = 600.0
    """Seconds for which a result stays available after its client has read it. A client whose connection broke can read
    the result again."""
    unread_result_kept_s: Annotated[float, Field(ge=60, le=2_592_000)] = 86_400.0
    """Seconds for which a result waits for its client to read it."""
    show_names: bool = False
    """Tell each node for which tenant it works, by the name of the tenant's token. If false, nodes see only a
    pseudonym, which stays the same for a tenant."""
