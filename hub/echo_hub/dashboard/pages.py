"""All routes for people, scripts and Prometheus. Each page is a module of its own."""

from __future__ import annotations

from aiohttp import web

from echo_hub.dashboard.access.attempts import Attempts
from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.access.login_page import LoginPage
from echo_hub.dashboard.actions import OperatorDesk
from echo_hub.dashboard.actions_api import ActionsApi
from echo_hub.dashboard.actions_page import ActionsRoom
from echo_hub.dashboard.api import Api, EventStream
from echo_hub.dashboard.assets import Assets
from echo_hub.dashboard.board import AboutView, BoardSource
from echo_hub.dashboard.curves import CurvesRoom
from echo_hub.dashboard.fleet_node_page import FleetNodePage
from echo_hub.dashboard.fleet_page import FleetPage
from echo_hub.dashboard.holder_pages import HolderPages
from echo_hub.dashboard.leaderboard_page import LeaderboardPage
from echo_hub.dashboard.live import LivePages
from echo_hub.dashboard.log_page import LogRoom
from echo_hub.dashboard.metrics import Metrics
from echo_hub.dashboard.openapi import serve as serve_openapi
from echo_hub.dashboard.operator_page import OperatorPage
from echo_hub.dashboard.public_rooms import PublicRooms
from echo_hub.dashboard.rollouts_page import RolloutsRoom, RolloutsSource
from echo_hub.dashboard.snapshots import Snapshots
from echo_hub.dashboard.source import PagesSource
from echo_hub.dashboard.templating import environment
from echo_hub.dashboard.tenants_page import TenantsPage, TenantsSource
from echo_hub.dashboard.try_page import TryDesk, TryRoom
from echo_hub.dashboard.viewers import Viewers


def routes(
    source: PagesSource,
    guard: Guard,
    desk: OperatorDesk,
    *,
    board: BoardSource,
    about: AboutView | None = None,
    rollouts: RolloutsSource | None = None,
    trials: TryDesk | None = None,
    tenants: TenantsSource | None = None,
    min_interval_s: float = 1.0,
    heartbeat_s: float = 15.0,
    node_series: bool = False,
) -> list[web.AbstractRouteDef]:
    """Return the routes that the pages add to the hub's application, whose middleware is `guard.middleware`.

    Viewers see nothing older than `min_interval_s` seconds, unless a snapshot of the run takes much processor time. A
    live connection sends an event at least every `heartbeat_s` seconds. Without `rollouts`, there are no pages of
    rollouts; without `trials`, no version can be tried. Without `tenants`, there is no page of tenants. `node_series`
    adds series for each node to /metrics.
    """
    snapshots = Snapshots(source, min_interval_s=min_interval_s)
    assets = Assets()
    templates = environment(assets)
    templates.globals["serves_tenants"] = tenants is not None
    api = Api(source, snapshots, guard)
    viewers, curves = Viewers(guard), CurvesRoom(source)
    live = LivePages(snapshots, guard, viewers, curves, of=assets.version, heartbeat_s=heartbeat_s)
    told = about or AboutView()
    login = LoginPage(guard, Attempts(), templates)
    return [
        web.get("/", OperatorPage(source, live, templates, curves).serve),
        web.get("/login", login.serve),
        web.post("/login", login.log_in),
        web.post("/logout", login.log_out),
        *_actions(desk, ActionsRoom(desk, snapshots, templates)),
        *LeaderboardPage(live, snapshots, board, guard.visits, templates, about=told).routes,
        *HolderPages(snapshots, board, curves, guard, templates).routes,
        *PublicRooms(snapshots, board, guard.visits, templates, about=told).routes,
        web.get("/api/v1/openapi.json", serve_openapi),
        web.get("/api/v1/run", api.run),
        web.get("/api/v1/nodes", api.nodes),
        web.get("/fleet", FleetPage(live, snapshots, templates).serve),
        *FleetNodePage(source, live, snapshots, templates).routes,
        web.get("/api/v1/steps", api.steps),
        web.get("/api/v1/curves", curves.serve),
        web.get("/api/v1/events", EventStream(snapshots, viewers, heartbeat_s=heartbeat_s).serve, allow_head=False),
        web.get("/metrics", Metrics(snapshots, node_series=node_series).serve),
        web.get("/healthz", api.live),
        web.get("/readyz", api.ready),
        web.get("/static/{name}", assets.serve),
        *LogRoom(source, templates).routes,
        *TryRoom(trials, templates).routes,
        *(() if tenants is None else TenantsPage(tenants, templates).routes),
        *(() if rollouts is None else RolloutsRoom(rollouts, templates).routes),
    ]


def _actions(desk: OperatorDesk, room: ActionsRoom) -> list[web.AbstractRouteDef]:
    api = ActionsApi(desk)
    return [
        web.get("/actions", room.serve),
        web.post("/actions/{action}", room.act),
        web.post("/actions/undo/{number}", room.undo),
        web.get("/api/v1/actions", api.log),
        web.post("/api/v1/actions/{action}", api.act),
        web.post("/api/v1/actions/{number}/undo", api.undo),
        web.get("/api/v1/tokens", api.tokens),
    ]
