"""All that the hub's port answers: nodes' connections and books, tracker, artefacts, installation, pages."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from aiohttp import web

from echo_hub.config.sections import HubConfig
from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.actions import OperatorDesk
from echo_hub.dashboard.pages import routes as page_routes
from echo_hub.dashboard.source import PagesSource
from echo_hub.intake.connected import ConnectedNodes
from echo_hub.intake.doors import Doors
from echo_hub.intake.receipts import certify
from echo_hub.intake.teams import change_own_team
from echo_hub.lifecycle.rollouts import HubRollouts, RolloutReader
from echo_hub.net.artefact_routes import routes as artefact_routes
from echo_hub.net.install_routes import routes as install_routes
from echo_hub.net.own_books import OwnBooks
from echo_hub.net.tracker import Introduce
from echo_hub.net.tracker import routes as tracker_routes
from echo_hub.serving.resources import Resources
from echo_hub.store.reading import read_receipts
from echo_hub.views.about import about_view
from echo_hub.views.board import HubBoard


def http_routes(
    config: HubConfig,
    opened: Resources,
    *,
    doors: Doors,
    nodes: ConnectedNodes,
    introduce: Introduce,
    pages: PagesSource,
    guard: Guard,
    desk: OperatorDesk,
) -> Iterator[web.AbstractRouteDef]:
    proxies, store = config.server.trusted_proxies, opened.store.store
    limits = doors.limits
    yield from doors.own.routes(nodes)
    sign = partial(certify, opened.store, opened.me, run_id=opened.run_id, run_name=config.run.name)
    books = OwnBooks(
        doors.own,
        look_up=lambda node_id, asked: opened.store.read_counted(read_receipts, node_id, asked),
        certify=sign,
        team=partial(change_own_team, store),
        now=limits.now,
    )
    yield from books.routes(nodes)
    yield from tracker_routes(opened.tracker, trusted_proxies=proxies, introduce=introduce)

    def vouch(request: web.Request, node_id: str) -> None:
        limits.vouch(request, node_id, is_known=nodes.knows(node_id))

    yield from artefact_routes(opened.publisher, opened.tracker, vouch, trusted_proxies=proxies)
    yield from install_routes(config.server.install_from)
    reader = RolloutReader(config, store=store, codec=opened.codec, problems=lambda: opened.problems)
    yield from page_routes(
        pages,
        guard,
        desk,
        board=HubBoard(store),
        about=about_view(config),
        rollouts=HubRollouts(reader),
        node_series=config.metrics.node_series,
    )
