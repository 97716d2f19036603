"""Make the tenants' service from a hub's parts."""

from __future__ import annotations

from echo_hub.config.tenants_section import TenantsConfig
from echo_hub.tenants.core import Offer, TenantCore
from echo_hub.tenants.housekeeping import TenantHousekeeping, TenantTimes
from echo_hub.tenants.model_requests import ModelRequests
from echo_hub.tenants.model_work import ModelWork
from echo_hub.tenants.recovery import Recovery
from echo_hub.tenants.reopening import Reopening
from echo_hub.tenants.sample_requests import RunVersions, SampleRequests
from echo_hub.tenants.sampling import TenantSampling
from echo_hub.tenants.service import TenantParts, TenantService
from echo_hub.tenants.version_saves import VersionSaves
from echo_hub.tenants.weights import Weights


def build_tenant_service(
    config: TenantsConfig, core: TenantCore, offer: Offer, run_versions: RunVersions
) -> TenantService:
    weights = Weights(core)
    saves = VersionSaves(core, weights)
    recovery = Recovery(core, checkpoint_every=config.checkpoint_every)
    work = ModelWork(core, recovery=recovery, weights=weights, saves=saves)
    sampling = TenantSampling(core)
    models = ModelRequests(core, offer, work=work, weights=weights, max_rank=config.max_rank)
    samples = SampleRequests(core, offer, models=models, sampling=sampling, weights=weights, run_versions=run_versions)
    times = TenantTimes(
        session_expires_s=config.session_expires_s,
        result_kept_s=config.result_kept_s,
        unread_result_kept_s=config.unread_result_kept_s,
    )
    housekeeping = TenantHousekeeping(core, times, work=work, sampling=sampling, weights=weights)
    return TenantService(
        TenantParts(
            core=core,
            offer=offer,
            weights=weights,
            saves=saves,
            work=work,
            sampling=sampling,
            models=models,
            samples=samples,
            housekeeping=housekeeping,
            reopening=Reopening(core, work=work, saves=saves, samples=samples),
        )
    )
