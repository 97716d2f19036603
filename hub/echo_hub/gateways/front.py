"""A gateway's inbox: asks the hub who may come in, stores what nodes send, and passes on what the hub has for them.

    node ──frame──► net.Gateway ──message──► Front ──► Uplink ──► JetStream ──► the hub, in order
                        ▲        ◄──received── as soon as JetStream has it on disk
                        └──frames── Front ◄── HubLine ◄── the hub

That a node's rollout is received is said here; all else that a node is told comes from the hub. While the hub is away,
nodes that are here stay, and what they send is stored.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from echo_hub.gateways.hub_line import HubLine
from echo_hub.gateways.items import Item, Kind, node_fields, refusal_of, rollout_item
from echo_hub.gateways.uplink import Uplink
from echo_hub.net.gateway import Gateway, NodeInfo
from echo_shared.codec import decode_from_hub, encode
from echo_shared.errors import LocalProtocolError, RefusedError
from echo_shared.messages import (
    MAX_BATCHED,
    Checked,
    FromNode,
    Receipt,
    Receipts,
    ReceiptState,
    RefusalCode,
    Rollout,
    Welcome,
)

ANSWER_S: Final = 15.0
"""The hub has answered by then: a node that joins waits no longer."""
HUB_AGAIN: Final = "The hub has restarted. Your node connects again."


@dataclass(slots=True)
class _Session:
    """A node's, on one connection of this gateway's."""

    node_id: str
    number: int
    early: list[Item] | None = field(default_factory=list)
    """What came for it before its Welcome was on its way; None: it is."""


@dataclass(frozen=True, slots=True)
class _Met:
    """What the hub has said of a node: the door's list of one guest."""

    front: Front
    invite_id: int | None
    is_known: bool

    async def about(self, node_id: str, token: str | None, nonce: bytes) -> _Met:
        return self

    def admit(self, node_id: str) -> None:
        self.front.admit(node_id)

    def knows(self, node_id: str) -> bool:
        return self.is_known

    def find_invite(self, node_id: str, token: str | None) -> int | None:
        return self.invite_id


class Front:
    """`line` and `uplink` are given to it before it is used, for they are made with its methods."""

    line: HubLine
    uplink: Uplink

    def __init__(self, gateway: Gateway, *, hub_host: str = "") -> None:
        """`hub_host`: where the hub is, if it is not at the address that nodes use."""
        self._gateway = gateway
        self._hub_host = hub_host
        self._requests = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Item]] = {}
        self._sessions: dict[int, _Session] = {}
        self._of_node: dict[str, _Session] = {}
        self._tasks: set[asyncio.Future[None]] = set()

    # --- the inbox

    async def about(self, node_id: str, token: str | None, nonce: bytes) -> _Met:
        answer = await self._ask(Kind.MEET, node_id, token, nonce)
        return _Met(self, invite_id=answer[2], is_known=answer[3])

    def admit(self, node_id: str) -> None:
        if not self.line.is_open:
            raise _hub_away()

    def knows(self, node_id: str) -> bool:
        return False

    def find_invite(self, node_id: str, token: str | None) -> int | None:
        return None

    async def node_joined(self, node: NodeInfo) -> Welcome:
        _, _, number, frame = await self._ask(
            Kind.JOIN, node_fields(replace(node, hub_host=self._hub_host or node.hub_host))
        )
        welcome = decode_from_hub(frame)
        session = self._sessions.get(number)
        if session is None:  # The hub has taken another connection of the node's since, or is gone.
            raise _hub_away()
        assert isinstance(welcome, Welcome), "JOINED carries nothing else"
        session.node_id = node.node_id
        self._of_node[node.node_id] = session
        # Behind the Welcome, which is queued as soon as this returns.
        asyncio.get_running_loop().call_soon(self._open, session)
        return welcome

    async def node_said(self, node_id: str, message: FromNode) -> None:
        session = self._of_node.get(node_id)
        number = 0 if session is None else session.number
        if isinstance(message, Rollout):
            size = message.completion_ids.nbytes + message.behavior_logprobs.nbytes
            await self.uplink.put(rollout_item(node_id, number, message), size)
        else:
            frame = encode(message)
            await self.uplink.put([Kind.SAID, node_id, number, frame], len(frame))

    async def node_left(self, node_id: str) -> None:
        session = self._of_node.pop(node_id, None)
        if session is not None:
            self._sessions.pop(session.number, None)
            await self.uplink.put([Kind.LEFT, node_id, session.number], 0)

    # --- what is stored

    def stored(self, items: Sequence[Item]) -> None:
        """JetStream has these on disk: nodes need not send them again."""
        received: dict[str, list[Receipt]] = {}
        for item in items:
            if item[0] == Kind.ROLLOUT:
                session = self._of_node.get(item[1])
                if session is not None and session.number == item[2]:
                    received.setdefault(item[1], []).append(_received(item[3]))
        for node_id, receipts in received.items():
            for start in range(0, len(receipts), MAX_BATCHED):
                part = tuple(receipts[start : start + MAX_BATCHED])
                self._gateway.send(node_id, Receipts.model_construct(receipts=part))

    # --- what the hub says

    async def begun(self) -> None:
        """The hub is another, or something that it said was lost."""
        for waiting in self._answers.values():
            if not waiting.done():
                waiting.set_exception(_hub_away())
        self._sessions.clear()
        await self._gateway.close(RefusalCode.SHUTTING_DOWN, HUB_AGAIN)

    def take(self, item: Item) -> None:
        """One item of what the hub has for this gateway."""
        match Kind(item[0]):
            case Kind.HERE:
                pass
            case Kind.MET | Kind.JOINED | Kind.REFUSED:
                self._answered(item)
            case Kind.SEND | Kind.PUSH | Kind.PART:
                session = self._sessions.get(item[1])
                if session is None:
                    return
                if session.early is not None:
                    session.early.append(item)
                else:
                    self._pass_on(session, item)
            case Kind.CLOSE:
                _, code, what = item
                self._begin(self._gateway.close(RefusalCode(code), what))
            case kind:
                raise LocalProtocolError("The hub says nothing of this kind to a gateway.", got=kind.name)

    def _answered(self, item: Item) -> None:
        waiting = self._answers.get(item[1])
        if waiting is None or waiting.done():
            self._not_wanted(item)
        elif item[0] == Kind.REFUSED:
            waiting.set_exception(refusal_of(item))
        else:
            if item[0] == Kind.JOINED:
                self._sessions[item[2]] = _Session("", item[2])
            waiting.set_result(item)

    def _not_wanted(self, answer: Item) -> None:
        """It came too late: of a node that the hub has let in, it hears that it is not here."""
        if answer[0] == Kind.JOINED:
            self._sessions.pop(answer[2], None)
            self._begin(self.uplink.put([Kind.LEFT, "", answer[2]], 0))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _open(self, session: _Session) -> None:
        early, session.early = session.early or [], None
        for item in early:
            self._pass_on(session, item)

    def _pass_on(self, session: _Session, item: Item) -> None:
        if item[0] == Kind.PART:
            self._sessions.pop(session.number, None)
        if self._of_node.get(session.node_id) is not session:
            return
        if item[0] == Kind.PART:
            self._gateway.dismiss(session.node_id, RefusalCode(item[2]), item[3])
        elif item[0] == Kind.SEND:
            self._gateway.relay(session.node_id, item[2])
        else:
            self._gateway.relay(session.node_id, item[2], (item[3][0], bool(item[3][1])))

    async def _ask(self, kind: Kind, *content: Any) -> Item:
        """The hub's answer. Raises RefusedError: its no, or that it says nothing."""
        if not self.line.is_open:
            raise _hub_away()
        request = next(self._requests)
        answer = self._answers[request] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(ANSWER_S):
                await self.line.ask([kind, request, *content])
                item: Item = await answer
                return item
        except BaseException as error:
            if answer.done() and not answer.cancelled() and answer.exception() is None:
                self._not_wanted(answer.result())
            if isinstance(error, TimeoutError):
                raise _hub_away() from error
            raise
        finally:
            del self._answers[request]


def _received(rollout_id: str) -> Receipt:
    return Receipt.model_construct(
        rollout_id=rollout_id, state=ReceiptState.RECEIVED, drop_reason=None, checked=Checked.NO
    )


def _hub_away() -> RefusedError:
    return RefusedError(
        "The hub is not there right now; this gateway is.",
        do="The node tries again by itself.",
        code=RefusalCode.SHUTTING_DOWN,
    )
