"""State and access that all parts of the tenants' service share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from echo_hub.run.directory import RunDirectory
from echo_hub.store.async_store import AsyncStore
from echo_hub.tenants.adapters import Adapters
from echo_hub.tenants.computing import ComputerHost, PromptScorer
from echo_hub.tenants.drawing import TenantDrawer
from echo_hub.tenants.futures import Futures
from echo_hub.tenants.identities import Identities
from echo_hub.tenants.outcomes import OfferedModel
from echo_hub.tenants.quotas import Quotas
from echo_hub.tenants.sampling_limits import SamplingFacts
from echo_hub.tenants.sessions import OpenSessions
from echo_hub.tenants.writing import TenantWriter

BASE: Final = "base"
"""Name by which clients can ask for the run's base model, in addition to its aliases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantCore:
    """State and access that the parts of the tenants' service share: memory, the database, the run's directory, the
    models' process and the drawer."""

    directory: RunDirectory
    store: AsyncStore
    writer: TenantWriter
    quotas: Quotas
    futures: Futures
    host: ComputerHost
    drawer: TenantDrawer
    adapters: Adapters
    scorer: PromptScorer | None = None
    """Computes log-probabilities of prompts on nodes; None = the hub's own device computes them."""
    sessions: OpenSessions = field(default_factory=OpenSessions)
    identities: Identities = field(default_factory=Identities)

    @classmethod
    def of(
        cls,
        directory: RunDirectory,
        store: AsyncStore,
        *,
        quotas: Quotas,
        host: ComputerHost,
        drawer: TenantDrawer,
        scorer: PromptScorer | None = None,
    ) -> TenantCore:
        writer = TenantWriter(store)
        return cls(
            directory=directory,
            store=store,
            writer=writer,
            quotas=quotas,
            futures=Futures(store, writer, quotas),
            host=host,
            drawer=drawer,
            adapters=Adapters(directory, drawer, writer),
            scorer=scorer,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Models that the hub offers to tenants, and the limits on sampling."""

    models: tuple[OfferedModel, ...]
    facts: SamplingFacts
    secret: str
    """Secret from which the seeds of samples and of new models are derived. It must stay the same at each start of the
    run, so that a repeated request gets the same seed.
    """

    @property
    def base_names(self) -> frozenset[str]:
        return frozenset((BASE, *(model.name for model in self.models)))
