"""A scripted run behind the interface that the pages read, and a server that serves these pages."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from echo_hub.actions.records import ActionRecord, Actor, ApiToken
from echo_hub.config.sections import HubConfig
from echo_hub.core.accounting.effects import StandingRecorded, TellOperator
from echo_hub.core.trust.standing import StandingRow, StandingState
from echo_hub.dashboard.access.credentials import OperatorCredentials
from echo_hub.dashboard.access.guard import Guard, Visits
from echo_hub.dashboard.actions import ActionResult, NoSuchActionError, OperatorDesk
from echo_hub.dashboard.board import sort_of
from echo_hub.dashboard.headers import add_security_headers
from echo_hub.dashboard.leaderboard_page import columns
from echo_hub.dashboard.model import (
    AdvisedNodes,
    CapacityView,
    CostView,
    CurriculumView,
    DisseminationView,
    Doing,
    NodeView,
    RunState,
    RunView,
    VersionView,
    WorkView,
)
from echo_hub.dashboard.pages import routes
from echo_hub.dashboard.session_figures import SessionFigures
from echo_hub.dashboard.source import Changes, RunPicture
from echo_hub.dashboard.tables import sort_rows
from echo_hub.evaluation.due import DueVersions
from echo_hub.oversight.operator_desk import Desk
from echo_hub.run.directory import RunDirectory
from echo_shared.records.credit import Board, BoardQuery, CreditStanding, Holder, PublicReceipt, StepShare, WorkKinds
from echo_shared.records.health import Health, HubState
from echo_shared.records.node import CheckEvidence, NodeOutcome, NodeRecord, TokenClass, TrustDecision, TrustStatus
from echo_shared.records.rollout import RolloutSummary
from echo_shared.records.run import (
    Accounting,
    EventFilter,
    NodeTotals,
    RunEvent,
    Severity,
    StepRecord,
    VersionRecord,
)
from tests.echo_hub.dashboard.scripted_views import (
    ROLLOUTS,
    STARTED,
    STEP_S,
    TRUST,
    WORK,
    evaluation_view,
    fleet_of,
    step_record,
)

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
CHROMIUM_FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)
HOSTILE_NAMES = (
    '<script>alert("owned")</script>',
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }}",
    "\u202egnp.exe\u202c \u200b\u0007",
    "W" * 64,
    "日本語のノード 🌊",
    "'; DROP TABLE nodes; --",
    "\u200b",
)


def node_totals(number: int, name: str, *, last_seen: float = STARTED, trained: int = 0) -> NodeTotals:
    return NodeTotals(
        node_id=f"{(number + 1) * 2654435761 % 16**10:010x}{number:010x}",
        name=name,
        backend=("llama_cpp", "torch")[number % 2],
        device=("AMD Ryzen 7 7840U", "NVIDIA GeForce RTX 4070", "Apple M3 Pro", "Intel Core i5-8250U")[number % 4],
        first_seen=STARTED,
        last_seen=last_seen,
        trained_rollouts=trained,
        received=trained + 55,
        dropped=number % 4,
        standing=("proven", "new", "quarantined", "")[number % 4],
        standing_reason="Its tokens are not drawn as leased <b>." if number % 4 == 2 else "",
        verified_in_a_row=number,
        checks=0 if number % 4 == 3 else 40 + number,
        failed_checks=int(number % 4 == 2),
        cost_per_hour=0.4 * (number % 3 == 1),
        cost=0.125 * (number % 3 == 1),
    )


def node_view(number: int, totals: NodeTotals, *, policy_version: int | None = None) -> NodeView:
    away = number % 9 == 8
    return NodeView(
        totals=totals,
        connected=not away,
        activity=("sampling", "sampling", "sampling", "waiting", "fetching")[number % 5],
        policy_version=policy_version,
        capacity=64,
        in_flight=0 if away else 40 + number % 20,
        tokens_per_s=420.0 / (1 + number % 13),
        precision=("q4_k_m", "bf16", "")[number % 3],
        costs_per_hour=0.4 * (number % 3 == 1),
        standby="" if number % 3 != 1 else "cheaper nodes suffice. They return enough.",
        num_links=number % 5,
        num_punched=number % 5 // 2,
    )


def rollout_summary(node: NodeView, number: int, *, checked: str) -> RolloutSummary:
    return RolloutSummary(
        rollout_id=f"{900 - number}-{number % 8}",
        group_id=300 - number,
        index=number % 8,
        turn=0,
        step=None if checked == "failed" else 36,
        evaluation="",
        node_id=node.totals.node_id,
        node_name=node.totals.name,
        policy_version=35,
        state="dropped" if checked == "failed" else "trained",
        drop_reason="forged" if checked == "failed" else None,
        detail="",
        checked=checked,
        reward=0.5,
        components={"score": 1.0, "format": 0.0},
        num_tokens=6,
        leased_at=STARTED + 100 - number,
        received_at=STARTED + 101,
        scored_at=STARTED + 102,
        final_at=STARTED + 103,
        not_kept="",
    )


def token_classes(*counts: int) -> tuple[TokenClass, ...]:
    edges = (0.001, 0.05, 0.2, 0.5, 1.0, None)
    return tuple(TokenClass(edge=edge, tokens=count) for edge, count in zip(edges, counts, strict=True))


def node_record(node: NodeView) -> NodeRecord:
    """Return the node's record. If the node is quarantined, the record contains the hub's decision to quarantine it,
    with the evidence.
    """
    evidence = CheckEvidence(
        draws=token_classes(900, 41, 3, 0, 0, 7),
        claims=token_classes(880, 60, 4, 0, 0, 7),
        mismatch_kl=0.0021,
        bias=-0.013,
    )
    is_condemned = node.totals.standing == "quarantined"
    condemned = TrustDecision(
        number=3,
        decided_at=STARTED + 90,
        decision="quarantined",
        reason=node.totals.standing_reason,
        rollout_id="900-0",
        evidence=evidence,
    )
    return NodeRecord(
        totals=node.totals,
        public_key="ab" * 32,
        outcomes=(
            NodeOutcome(outcome="trained", rollouts=90, received=90, tokens=540),
            NodeOutcome(outcome="expired", rollouts=10, received=0, tokens=0),
        ),
        shown=None if is_condemned else evidence,
        decisions=(condemned,) if is_condemned else (),
        checked=(rollout_summary(node, 0, checked="failed" if is_condemned else "passed"),),
        rollouts=tuple(rollout_summary(node, number, checked="no") for number in range(1, 4)),
    )


class ScriptedSource:
    """A scripted run. Its figures depend on the number of trained steps, which `advance` increases by one."""

    def __init__(self, *, names: tuple[str, ...] = ("cobalt-heron", "attic-pc"), step: int = 0) -> None:
        self.changes = Changes()
        self.names = names
        self.step = step
        self.total = 60
        self.problems: tuple[str, ...] = ()
        self.problem_kinds: tuple[str, ...] = ()
        self.starting = False
        self.doing: Doing | None = None
        """Activity that the pages show; if None, it follows from the other values."""
        self.waited_s = 0.0
        """Seconds that the learner has waited since the newest step."""
        self.address = ""
        self.install_command = self.windows_install_command = ""
        self.spread: DisseminationView | None = None
        self.trains = True
        self.num_reads = 0
        self.processor_s = 0.0

    def advance(self, steps: int = 1) -> None:
        self.step = min(self.step + steps, self.total)
        self.changes.notify()

    @property
    def now(self) -> float:
        return STARTED + STEP_S * (self.step + 0.6) + self.waited_s

    async def run_view(self) -> RunView:
        self.num_reads += 1
        newest = step_record(self.step) if self.step else None
        trained, flight = self.step * ROLLOUTS, 690 if self.names and self.step < self.total else 0
        dropped = {"stale": 8 * self.step, "expired": self.step // 2, "duplicate": self.step // 3} if self.step else {}
        evaluated = {*range(0, self.step, 15), *([self.step] if self.step == self.total else [])}
        return RunView(
            as_of=self.now,
            trains=self.trains,
            run_id="3f9a1c62d0b84e7a",
            name="echo",
            mode="async",
            task="arithmetic",
            base_model="builtin:tiny",
            join_command="echo-node join http://192.168.1.20:8710",
            install_command=self.install_command,
            address=self.address,
            windows_install_command=self.windows_install_command,
            state=RunState.FINISHED if self.step == self.total else RunState.RUNNING,
            state_detail="" if self.names else "Waiting for a first node.",
            doing=self.doing or self._doing(),
            health=self.health(),
            problems=self.problems,
            problem_kinds=self.problem_kinds,
            starting=self.starting,
            started_at=STARTED,
            finished_at=self.now if self.step == self.total else None,
            steps_total=self.total,
            trained_step=self.step,
            published_version=self.step,
            group_size=8,
            max_staleness=2,
            newest_step=newest,
            rollouts_per_s=128.4 if newest and self.step < self.total else 0.0,
            rollouts_gone_on=19 if newest else 0,
            tokens_saved=4_100 if newest else 0,
            turned_away={"connection": {"head_too_late": 7}},
            sessions=SessionFigures(open=6, slots=8, most=8, waiting=2),
            judged={
                "style": {
                    "calls": 9,
                    "unanswered": 2,
                    "without_verdict": 1,
                    "tokens_read": 900,
                    "tokens_written": 70,
                }
            },
            buffered_groups=31 if newest and self.step < self.total else 0,
            accounting=Accounting(
                leased=trained + flight + sum(dropped.values()), trained=trained, dropped=dropped, in_flight=flight
            ),
            evaluations=tuple(evaluation_view(v) for v in sorted(evaluated)),
            versions=tuple(self._version(v) for v in range(self.step, max(0, self.step - 20), -1)),
            fetches_by_transport={"swarm": 2 * self.step, "web_seed": self.step // 5} if self.step else {},
            dissemination=self.spread,
            newest_complete=self.step - 1 if self.step else None,
            nodes_on_newest=len(self.names),
            nodes_connected=len(self.names),
            nodes_known=len(self.names),
            nodes_useful=len(self.names),
            uplink_bytes_s=2.5e6 if self.step else None,
            events=self._events(),
            capacity=self._capacity() if newest else None,
            work=WORK if newest else WorkView(),
            cost=self._cost(trained) if newest else None,
            curriculum=CurriculumView(by="problem", solved=7, hopeless=3, between=20, passed_over=41),
            trust=TRUST if newest else TrustStatus(),
        )

    def _doing(self) -> Doing:
        if self.step == self.total:
            return Doing.FINISHED
        if self.starting:
            return Doing.STARTING
        return Doing.TRAINING if self.names else Doing.LACKS_NODES

    def _cost(self, trained: int) -> CostView:
        return CostView(
            spend_per_hour=0.4,
            spend_cap_per_hour=2.0,
            total=0.125,
            active_s=1_125.0,
            per_trained_rollout=0.125 / trained,
            nodes_active=1,
            nodes_standing_by=2,
        )

    def _capacity(self) -> CapacityView:
        kinds = tuple(f"{('llama_cpp', 'torch')[i % 2]} · {name}" for i, name in enumerate(self.names[:4]))
        idle = {"rollouts": 0.23, "hand_off": 0.04, "evaluation": 0.02, "down": 0.0, "start": 0.01}
        return CapacityView(
            window_s=STEP_S * min(self.step, 64),
            idle_share=sum(idle.values()),
            idle_by_reason=idle,
            step_s=3.1,
            broadcast_s=0.9,
            predicted_utilisation=0.74,
            rollouts_per_s=128.0,
            needed_per_s=165.2,
            missing_per_s=37.2,
            advised_nodes=tuple(
                AdvisedNodes(kind=kind, count=None if i == 3 else 3 - i) for i, kind in enumerate(kinds)
            ),
            advised_staleness=None,
            advised_interval=None,
            verdict="At this pace, the learner waits 23% of the time: it takes 165 rollouts/s, the nodes return 128. "
            + " ".join(f"Add 3 nodes like {kind}." for kind in kinds[:1]),
        )

    def _version(self, version: int) -> VersionView:
        record = VersionRecord(
            policy_version=version,
            published_at=STARTED + STEP_S * version + 0.3,
            payload_bytes=430_112 if version % 4 else 1_120_400,
            carrier="delta" if version % 4 else "keyframe",
            way="broadcast",
            dissemination_p50_s=0.34 + version % 5 / 20,
            dissemination_p95_s=0.8 + version % 5 / 20,
            dissemination_max_s=0.9 + version % 7 / 10,
            fetches_by_transport={"swarm": 0, "broadcast": len(self.names)},
            bytes_by_transport={"pushed": 430_112, "mesh": 430_112 * len(self.names)},
        )
        return VersionView(record=record, size_bytes=1_412_096)

    def _events(self) -> tuple[RunEvent, ...]:
        joined = [
            RunEvent(number=i + 1, at=STARTED + i, kind="node_joined", text=f"{name} joined", subject=name[:64])
            for i, name in enumerate(self.names[:6])
        ]
        if self.step > 20:
            text = "The learner process ended (signal 9); restarted from step 20."
            at = STARTED + STEP_S * 20
            joined.append(
                RunEvent(number=7, at=at, kind="learner_died", severity=Severity.WARNING, text=text, data={"deaths": 1})
            )
        return tuple(joined[::-1])

    def health(self) -> Health:
        if self.problems:
            return Health(state=HubState.DEGRADED, reasons=self.problems)
        if self.step == self.total:
            return Health(state=HubState.FINISHED)
        if self.starting:
            return Health(state=HubState.STARTING, reasons=("The learner is starting.",))
        return Health(state=HubState.READY if self.names else HubState.LIVE)

    async def events(self, wanted: EventFilter, limit: int) -> tuple[RunEvent, ...]:
        found = (event for event in self._events() if wanted.kind in ("", event.kind))
        found = (event for event in found if wanted.subject in ("", event.subject))
        found = (event for event in found if wanted.severity in ("", "info") or event.warning)
        return tuple(event for event in found if wanted.before is None or event.number < wanted.before)[:limit]

    async def picture(self) -> RunPicture:
        return RunPicture(run=await self.run_view(), nodes=fleet_of(await self.nodes()), processor_s=self.processor_s)

    async def nodes(self) -> tuple[NodeView, ...]:
        share = self.step * ROLLOUTS // max(len(self.names), 1)
        return tuple(
            node_view(
                i,
                node_totals(i, name, last_seen=self.now - (3700 if i % 9 == 8 else i % 5), trained=share),
                policy_version=self.step - i % 2 if self.step > 1 else None,
            )
            for i, name in enumerate(self.names)
        )

    async def node(self, node_id: str) -> NodeRecord | None:
        found = [view for view in await self.nodes() if view.totals.node_id == node_id]
        return node_record(found[0]) if found else None

    async def steps(self, since: int) -> tuple[StepRecord, ...]:
        return tuple(step_record(step) for step in range(since + 1, self.step + 1))

    async def standings(self) -> tuple[CreditStanding, ...]:
        total = self.step * ROLLOUTS
        weights = [1 / (1 + i) for i in range(len(self.names))]
        shares = [weight / sum(weights) for weight in weights] if total else []
        return tuple(
            CreditStanding(
                kind="node",
                rank=i + 1,
                node=node_totals(i, self.names[i]).node_id[:10],
                name=self.names[i],
                rollouts=round(total * share),
                tokens=round(total * share * 6.2),
                share=share,
                recent=total * share,
                steps=self.step,
                streak_days=1 + i,
                longest_streak=2 + i,
                first_day=int(STARTED // 86_400),
                last_day=int(STARTED // 86_400),
                last_seen=self.now - i * 40,
                work=WorkKinds(trained_rollouts=round(total * share), trained_tokens=round(total * share * 6.2)),
            )
            for i, share in enumerate(shares)
        )


class ScriptedBoard:
    def __init__(self, source: ScriptedSource) -> None:
        self._source = source

    async def board(self, wanted: BoardQuery) -> Board:
        rows = await self._source.standings() if wanted.kind == "node" else ()
        found = [row for row in rows if wanted.search.lower() in row.name.lower()]
        ordered = sort_rows(found, columns("node", has_elsewhere=True), sort_of(wanted))
        page = ordered[wanted.after : wanted.after + wanted.limit]
        return Board(rows=tuple(page), num_found=len(found), num_ranked=len(rows))

    async def node(self, start: str) -> tuple[str, Holder] | None:
        rows = [row for row in await self._source.standings() if row.node == start]
        return (start, Holder(standing=rows[0], days=())) if rows else None

    async def team(self, name: str) -> tuple[str, Holder] | None:
        return None

    async def shares(self, holder: str, width: int) -> Mapping[int, StepShare]:
        return {0: StepShare(rollouts=4, share=0.5)}

    async def receipt(self, rollout_id: str) -> PublicReceipt | None:
        return None


@pytest.fixture
def hostile_names() -> tuple[str, ...]:
    return HOSTILE_NAMES


@pytest.fixture
def make_source() -> type[ScriptedSource]:
    return ScriptedSource


@pytest.fixture
def source() -> ScriptedSource:
    return ScriptedSource(step=37)


class NothingDone:
    async def act(self, action: str, fields: Mapping[str, Any], by: Actor, *, strict: bool = False) -> ActionResult:
        raise NoSuchActionError(action)

    async def undo(self, number: int, by: Actor) -> ActionResult:
        raise NoSuchActionError(str(number))

    async def log(self, *, limit: int, before: int | None) -> Sequence[ActionRecord]:
        return ()

    async def tokens(self) -> Sequence[ApiToken]:
        return ()


class NoKeys:
    """Stand-in for a run directory whose key needs no rotation."""

    def rotate_key(self) -> None: ...


@pytest.fixture
async def desk(drive: Any, guard: Guard, source: ScriptedSource, tmp_path: Path) -> Desk:
    """Return the hub's real desk for operators' actions, with a real coordinator and store. Its nodes have the ids of
    the scripted source's nodes."""
    driven = await drive()
    for totals in (node_totals(number, "node") for number in range(len(HOSTILE_NAMES))):
        named = {"node_id": totals.node_id, "name": totals.name, "public_key": bytes(32)}
        driven.store.node_seen(**named, backend="torch", device="cpu", now=1.0)
        if totals.standing == "quarantined":
            row = StandingRow(node_id=totals.node_id, state=StandingState.QUARANTINED)
            driven.store.apply([StandingRecorded(row=row)], 1.0)
    made = Desk(
        driven.async_store,
        RunDirectory(tmp_path),
        guard=guard,
        queue=driven.queue,
        due=DueVersions(HubConfig(), RunDirectory(tmp_path), done=()),
        run_keys=NoKeys(),
        changes=source.changes,
    )
    driven.look = lambda action: made.settled(action.number) if isinstance(action, TellOperator) else None
    return made


Open = Callable[..., Awaitable[ClientSession]]


TOKEN = "the-operators-token-of-this-test-and-no-other"


@pytest.fixture
def guard(tmp_path: Path) -> Guard:
    (tmp_path / "operator.token").write_text(TOKEN)
    credentials = OperatorCredentials(token=tmp_path / "operator.token", password=tmp_path / "operator.password")
    credentials.open()
    return Guard(credentials, Visits(place=lambda _: "127.0.0.1", is_https=lambda _: False), name="test")


@pytest.fixture
def servers() -> list[TestServer]:
    return []


@pytest.fixture
async def open_hub(guard: Guard, servers: list[TestServer]) -> AsyncIterator[Open]:
    """Yield a function that serves a scripted run on a real port and returns a client session for it. The client is
    logged in as operator, unless `token` differs."""
    sessions = []

    async def open_(
        source: ScriptedSource,
        *,
        token: str = TOKEN,
        desk: OperatorDesk | None = None,
        port: int | None = None,
        **settings: Any,
    ) -> ClientSession:
        application = web.Application(middlewares=[guard.middleware])
        application.on_response_prepare.append(add_security_headers)
        times = {"min_interval_s": 0.0, "heartbeat_s": 5.0, **settings}
        application.add_routes(routes(source, guard, desk or NothingDone(), board=ScriptedBoard(source), **times))
        server = TestServer(application, port=port)
        await server.start_server(shutdown_timeout=0.1)
        servers.append(server)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        session = ClientSession(server.make_url("/"), headers=headers)
        sessions.append(session)
        return session

    yield open_
    for session in sessions:
        await session.close()
    for server in servers:
        await server.close()


@pytest.fixture
async def hub(open_hub: Open, source: ScriptedSource) -> ClientSession:
    return await open_hub(source)


@pytest.fixture
async def browser() -> AsyncIterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        launched = await playwright.chromium.launch(executable_path=CHROMIUM, args=list(CHROMIUM_FLAGS))
        yield launched
        await launched.close()
