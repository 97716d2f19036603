"""The hub's service for tenants: the process of their models, the drawing of their samples, their versions and
limits.
"""

from __future__ import annotations

import hashlib

from echo_hub.config.tenants_section import TenantsConfig
from echo_hub.core.coordinator import Coordinator
from echo_hub.distribution.service import DistributionService
from echo_hub.driving.resources import Resources
from echo_hub.driving.shared import Shared
from echo_hub.intake.service import IntakeService
from echo_hub.learner.models.process import TenantModels
from echo_hub.run.directory import RunDirectory
from echo_hub.tenants.building import build_tenant_service
from echo_hub.tenants.computing import ComputerHost, PromptScorer
from echo_hub.tenants.core import BASE, Offer, TenantCore
from echo_hub.tenants.hub_drawer import HubDrawer
from echo_hub.tenants.node_drawer import NodeDrawer
from echo_hub.tenants.outcomes import OfferedModel
from echo_hub.tenants.quotas import Quotas, TenantLimits
from echo_hub.tenants.sampling_limits import SamplingFacts
from echo_hub.tenants.service import TenantService


class ModelsStarter:
    """Starts the process that holds tenants' models, on the device of [tenants]."""

    def __init__(self, resources: Resources) -> None:
        settings, device = resources.learner, resources.config.tenants.device
        learner = settings.learner.model_copy(update={"device": device})
        self._settings = settings.model_copy(update={"learner": learner})
        self._run_dir = resources.directory.root

    async def start(self) -> TenantModels:
        return await TenantModels.start(self._settings, self._run_dir)


class OwnVersions:
    """The run's own versions, from which tenants may sample."""

    def __init__(self, name: str, coordinator: Coordinator, directory: RunDirectory) -> None:
        self.name = name
        self._coordinator = coordinator
        self._directory = directory

    def newest(self) -> int:
        return self._coordinator.published_version

    def has(self, policy_version: int) -> bool:
        is_published = policy_version <= self._coordinator.published_version
        return is_published and self._directory.adapter(policy_version).is_dir()


def node_drawer(shared: Shared, intake: IntakeService, distribution: DistributionService) -> NodeDrawer | None:
    """Return the object that lets nodes draw tenants' samples; the caller runs it. Return None if the hub draws them
    itself.
    """
    resources = shared.resources
    config = resources.config
    if not config.serves_tenants or config.tenants.drawn_by != "nodes" or config.run.mode == "colocated":
        return None
    drawer = NodeDrawer(
        queue=shared.queue,
        store=resources.store,
        asked=resources.asked,
        bounds=resources.group_bounds,
        coordinator=resources.coordinator,
        live=shared.live,
        publishing=distribution.publishing,
        directory=resources.directory,
        streamed=intake.partials,
        restored=resources.answers,
        answered=resources.answered,
        is_checking=config.trust.verifier != "off",
    )
    intake.deliveries.go_to(drawer)
    return drawer


def tenant_service(shared: Shared, *, scorer: PromptScorer, nodes: NodeDrawer | None) -> TenantService:
    """Return the service; the caller opens, runs and closes it. `scorer`: nodes that compute log-probabilities.
    `nodes`: the drawer by nodes; None: the hub draws."""
    resources = shared.resources
    config, codec = resources.config, resources.codec
    host = ComputerHost(ModelsStarter(resources))
    core = TenantCore.of(
        resources.directory,
        resources.store,
        quotas=Quotas(limits_of(config.tenants)),
        host=host,
        drawer=nodes or HubDrawer(host, resources.directory),
        scorer=scorer if config.tenants.prompt_logprobs_by == "nodes" else None,
    )
    offer = Offer(
        models=tuple(
            OfferedModel(name=name, max_context_length=codec.context_tokens, trainable=True)
            for name in config.tinker.aliases or (BASE,)
        ),
        facts=SamplingFacts(
            vocabulary_size=resources.bounds.vocabulary_size,
            context_tokens=codec.context_tokens,
            stop_ids=resources.bounds.stop_ids,
            can_check=config.tenants.drawn_by == "hub" or config.trust.verifier != "off",
        ),
        secret=_secret(resources),
    )
    versions = OwnVersions(config.run.name, resources.coordinator, resources.directory)
    return build_tenant_service(config.tenants, core, offer, versions)


def limits_of(config: TenantsConfig) -> TenantLimits:
    """Return the limits from the settings. They apply to tenants for which no operator has set other limits."""
    return TenantLimits(
        tokens_per_day=config.tokens_per_day,
        max_queued=config.max_queued,
        max_models=config.max_models,
        max_checkpoint_bytes=config.max_checkpoint_bytes,
        max_result_bytes=config.max_result_bytes,
    )


def _secret(resources: Resources) -> str:
    """Return the secret that decides the seeds of tenants' samples. The hub's key determines it, so every start derives
    the same one."""
    return hashlib.blake2b(resources.me.sign(b"echo: seeds of tenants"), digest_size=32).hexdigest()
