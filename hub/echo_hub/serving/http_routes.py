"""HTTP routes of the hub's port: nodes' connections and records, tracker, artefacts, installation, and pages."""

from __future__ import annotations

from collections.abc import Iterator

from aiohttp import web

from echo_hub.dashboard.board import AboutView
from echo_hub.dashboard.pages import routes as page_routes
from echo_hub.driving.shared import Shared
from echo_hub.intake.node_records import NodeRecords
from echo_hub.lifecycle.rollouts import HubRollouts, RolloutReader
from echo_hub.net.artefact_routes import Vouching
from echo_hub.net.artefact_routes import routes as artefact_routes
from echo_hub.net.install_routes import routes as install_routes
from echo_hub.net.own_books import OwnBooks
from echo_hub.net.sightings import Sightings
from echo_hub.net.sightings import routes as sighting_routes
from echo_hub.net.tracker import routes as tracker_routes
from echo_hub.openai.api import OpenAiApi
from echo_hub.openai.base_files import fingerprint_of
from echo_hub.serving.services import HubServices
from echo_hub.serving.tenant_pages import TenantPages
from echo_hub.talking.trying import Trials
from echo_hub.tinker.routes import routes as tinker_routes
from echo_hub.tinker.wire import TinkerWire
from echo_hub.views.board import HubBoard


def http_routes(shared: Shared, services: HubServices, trials: Trials) -> Iterator[web.AbstractRouteDef]:
    resources, connections = shared.resources, shared.connections
    config, store = resources.config, resources.store.store
    proxies = config.server.trusted_proxies
    intake, oversight = services.intake, services.oversight
    yield from connections.own.routes(intake.nodes)
    books = OwnBooks(connections.own, NodeRecords(resources, intake.relay, shared.live))
    yield from books.routes(intake.nodes)
    yield from tracker_routes(
        resources.tracker, trusted_proxies=proxies, introductions=services.distribution.distributor
    )
    vouching = Vouching(connections.limits, intake.nodes)
    if config.dissemination.punching:
        yield from sighting_routes(Sightings(resources.me), resources.tracker, vouching, trusted_proxies=proxies)
    yield from artefact_routes(resources.publisher, resources.tracker, vouching, trusted_proxies=proxies)
    yield from install_routes(config.server.install_from)
    reader = RolloutReader(config, store=store, codec=resources.codec, problems=resources.problems)
    yield from page_routes(
        oversight.pages,
        oversight.guard,
        oversight.desk,
        board=HubBoard(store),
        about=AboutView(**config.about.model_dump(), needs_token=config.server.join == "invite"),
        rollouts=HubRollouts(reader, resources.sessions),
        trials=trials,
        tenants=TenantPages(store, tokens_per_day=config.tenants.tokens_per_day) if config.serves_tenants else None,
        node_series=config.metrics.node_series,
    )
    if config.tinker.enabled and services.tenants is not None and services.access is not None:
        yield from tinker_routes(
            TinkerWire(service=services.tenants, access=services.access, address=oversight.guard.visits.address)
        )
    if config.openai.enabled and services.tenants is not None and services.access is not None:
        api = OpenAiApi(
            services.tenants,
            services.access,
            resources.codec,
            vocabulary_size=resources.bounds.vocabulary_size,
            fingerprint=fingerprint_of(resources.learner.base_dir),
        )
        yield from api.routes
