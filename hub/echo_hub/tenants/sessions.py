"""Open sessions with their models and samplers, as they are in memory.

Ids are `s-RANDOM` for a session, `SESSION:train:N` for a model and `SESSION:sample:N` for a sampler. They carry 128
random bits, so nobody can guess another tenant's.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from echo_hub.store.tenant_records import SamplerRow
from echo_hub.tenants.gradient_state import GradientState, JournalKind
from echo_hub.tenants.order import ModelOrder
from echo_hub.tenants.outcomes import ModelInfo
from echo_hub.tenants.requests import LoraWish


def new_session_id() -> str:
    return f"s-{secrets.token_hex(16)}"


def new_request_id() -> str:
    return f"r-{secrets.token_hex(16)}"


def model_id_of(session_id: str, model_seq_id: int) -> str:
    return f"{session_id}:train:{model_seq_id}"


def sampler_id_of(session_id: str, sampler_seq_id: int) -> str:
    return f"{session_id}:sample:{sampler_seq_id}"


def session_id_of(owner_id: str) -> str:
    """Return the session id of a model or sampler."""
    return owner_id.partition(":")[0]


def directory_name(model_id: str) -> str:
    """Return a model's id in a form that is a valid file name on every system."""
    return model_id.replace(":", "-")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingArrival:
    """A training request that waits or runs. `kind` None: it was refused, so there is nothing to compute."""

    request_id: str
    kind: JournalKind | None
    num_bytes: int = 0
    """Size of the request's row in the journal, in bytes."""


@dataclass(slots=True, kw_only=True)
class LiveModel:
    """A model of an open session."""

    model_id: str
    tenant_id: str
    session_id: str
    base_model: str
    lora: LoraWish
    user_metadata: dict[str, str]
    order: ModelOrder
    gradient: GradientState
    steps: int = 0
    covered_seq: int = -1
    directory: str = ""
    last_request_at: float = 0.0
    arrivals: dict[int, TrainingArrival] = field(default_factory=dict)
    steps_since_cover: int = 0
    bytes_since_cover: int = 0
    """Bytes of the journal since the hub's last checkpoint of the model."""
    deaths: int = 0
    """Number of consecutive process deaths during this model's requests."""

    @property
    def bytes_waiting(self) -> int:
        """Bytes of the requests that wait or run."""
        return sum(arrival.num_bytes for arrival in self.arrivals.values())

    @property
    def info(self) -> ModelInfo:
        return ModelInfo(
            model_id=self.model_id,
            session_id=self.session_id,
            base_model=self.base_model,
            rank=self.lora.rank,
            attention=self.lora.attention,
            mlp=self.lora.mlp,
            steps=self.steps,
            user_metadata=self.user_metadata,
            last_request_at=self.last_request_at,
        )


@dataclass(slots=True, kw_only=True)
class LiveSampler:
    """A sampler of an open session."""

    row: SamplerRow
    last_used: float
    newest_seq: dict[int, int] | None = None
    """Largest seq_id of each clone, if the sampler was created since the hub's start. None: the database must be
    asked."""


@dataclass(slots=True, kw_only=True)
class LiveSession:
    session_id: str
    tenant_id: str
    last_seen: float
    models: dict[str, LiveModel] = field(default_factory=dict)
    samplers: dict[str, LiveSampler] = field(default_factory=dict)


class OpenSessions:
    """All open sessions. The methods return None if the object is missing, has ended, or belongs to another tenant."""

    def __init__(self) -> None:
        self._sessions: dict[str, LiveSession] = {}

    def all(self) -> list[LiveSession]:
        return list(self._sessions.values())

    def add(self, session: LiveSession) -> None:
        self._sessions[session.session_id] = session

    def remove(self, session_id: str) -> LiveSession | None:
        return self._sessions.pop(session_id, None)

    def session(self, tenant_id: str, session_id: str) -> LiveSession | None:
        found = self._sessions.get(session_id)
        return found if found is not None and found.tenant_id == tenant_id else None

    def model(self, tenant_id: str, model_id: str) -> LiveModel | None:
        session = self.session(tenant_id, session_id_of(model_id))
        return None if session is None else session.models.get(model_id)

    def sampler(self, tenant_id: str, sampler_id: str) -> LiveSampler | None:
        session = self.session(tenant_id, session_id_of(sampler_id))
        return None if session is None else session.samplers.get(sampler_id)

    def any_model(self, model_id: str) -> LiveModel | None:
        """Return the model with this id, of any tenant."""
        session = self._sessions.get(session_id_of(model_id))
        return None if session is None else session.models.get(model_id)

    def models(self, tenant_id: str) -> list[LiveModel]:
        """Return all models of a tenant."""
        own = (session for session in self._sessions.values() if session.tenant_id == tenant_id)
        return [model for session in own for model in session.models.values()]

    def num_sessions(self, tenant_id: str) -> int:
        return sum(session.tenant_id == tenant_id for session in self._sessions.values())
