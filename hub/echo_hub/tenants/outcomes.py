"""Answers of the tenants' service, for both APIs (`echo_hub.tinker` and `echo_hub.openai`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from echo_hub.tenants.requests import PassResult, SampleResult, WeightsKind


@dataclass(frozen=True, slots=True, kw_only=True)
class OfferedModel:
    name: str
    """Alias under which clients know the base model."""
    max_context_length: int
    trainable: bool
    tokenizer: str = ""
    """Name by which clients load the tokenizer; empty = `name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """Answer to a client whose request has no outcome yet."""

    reason: str
    """Why the client waits, in one sentence for people; empty = the request is being computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """Answer to a client whose request has failed for good."""

    error: str
    category: str
    """Category of the error: `user`, `server` or `unknown`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCreated:
    model_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTaken:
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsSaved:
    path: str = ""
    """`tinker://MODEL/KIND/NAME`; empty if an unnamed version was saved for the sampler `sampler_id`."""
    sampler_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsLoaded:
    path: str
    model_id: str
    steps: int = 0
    """Number of optimizer steps that the model has made."""


Outcome = ModelCreated | StepTaken | WeightsSaved | WeightsLoaded | PassResult | SampleResult | Failed


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    model_id: str
    session_id: str
    base_model: str
    """Name of the base model as the client gave it when it created the model."""
    rank: int
    attention: bool
    mlp: bool
    steps: int
    user_metadata: Mapping[str, str]
    last_request_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCheckpoint:
    path: str
    kind: WeightsKind
    made_at: float
    size_bytes: int
    expires_at: float | None
    model: ModelInfo
    recipients: tuple[str, ...] = ()
    """Public keys of the encryption program age. If there are any, clients get the files encrypted to these keys."""
    user_metadata: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A request that is stored and will be computed. Its outcome is available under `request_id`."""

    request_id: str
    sequence_ids: tuple[str, ...] = ()
    """Ids of the samples of a `sample` request."""
