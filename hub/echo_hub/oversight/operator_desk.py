"""Carry out the operator's actions, from the page, the JSON API and the command line.

    page, JSON API ──> act ──┐
    echo-hub act ──> store ──┴─> coordinator, or a part of the hub ──> store: done, or refused

Actions are stored before the hub carries them out. A result is committed together with the data that the action
changed. After a crash, the next start carries out the actions without a result. Actions with a result are never
repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from echo_hub.actions.records import ActionOutcome, ActionRecord, Actor, ApiToken, is_good_for
from echo_hub.actions.requests import (
    AnyRequest,
    DistrustNode,
    Drain,
    EvaluateNow,
    Export,
    Pause,
    PublishNow,
    Resume,
    RotateOperatorToken,
    RotateRunKey,
    SetLearningRate,
    SetMaxStaleness,
    SetObjective,
    SetPublishEvery,
    SetSpendCap,
    TrustNode,
    WrongRequestError,
    request_of,
    taking_back,
)
from echo_hub.core.accounting.effects import ActionSettled
from echo_hub.core.accounting.events import NodeVouchedFor, OperatorAsked
from echo_hub.core.operating import PUBLISH_NOW, LiveSetting
from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.actions import ActionResult, ForbiddenError, NoSuchActionError
from echo_hub.dashboard.source import Changes
from echo_hub.driving.event_queue import EventQueue
from echo_hub.evaluation.due import DueVersions
from echo_hub.lifecycle.export import export_adapter
from echo_hub.net.distributor import Distributor
from echo_hub.oversight.secrets_made import secret_of
from echo_hub.run.directory import RunDirectory
from echo_hub.store.actions import (
    find_action,
    note_action,
    read_action_log,
    read_api_tokens,
    read_num_api_tokens,
    read_wanted_actions,
    settle_action,
    was_undone,
)
from echo_hub.store.async_store import AsyncStore
from echo_shared.errors import EchoError

log = logging.getLogger(__name__)

LOOK_S: Final = 1.0
"""Seconds between two readings of the database for new actions of `echo-hub` commands and changed tokens."""
PATIENCE_S: Final = 10.0
"""Longest time for which page and API wait for an action's result, in seconds. After that they answer that the action
is pending."""


class Desk:
    """Carries out the operator's actions. Actions for the coordinator go to `queue`, evaluations to `due`. `changes` is
    notified of results.
    """

    def __init__(
        self,
        store: AsyncStore,
        directory: RunDirectory,
        *,
        guard: Guard,
        queue: EventQueue,
        due: DueVersions,
        run_keys: Distributor,
        changes: Changes,
    ) -> None:
        self._store = store
        self._directory = directory
        self._guard = guard
        self._queue = queue
        self._due = due
        self._run_keys = run_keys
        self._changes = changes
        self._taken: set[int] = set()
        """Numbers of the actions that were begun since the hub's start, so that no action is begun twice."""
        self._taking = asyncio.Lock()
        self._settled: dict[int, asyncio.Event] = {}
        """Events by action number. A page or API request waits for each of these actions."""
        self._known_tokens: tuple[int, int] | None = None

    async def run(self) -> None:
        """Carry out the actions that `echo-hub` commands stored, and reload changed tokens, until cancelled."""
        while True:
            await self.renew_tokens()
            async with self._taking:
                for record in await self._store.read(read_wanted_actions):
                    if record.number not in self._taken:
                        await self._begin(record)
            await asyncio.sleep(LOOK_S)

    async def act(
        self, action: str, fields: Mapping[str, Any], by: Actor, *, strict: bool = False, undoes: int | None = None
    ) -> ActionResult:
        """Store the action, carry it out, and wait up to `PATIENCE_S` for its result. If WrongRequestError or
        ForbiddenError is raised, nothing was stored."""
        request = request_of(action, fields, strict=strict)
        if not is_good_for(by.scope, request.SCOPE):
            raise ForbiddenError(f"{action} takes a token of scope {request.SCOPE}; this one is for {by.scope}.")
        secret, secret_hash = secret_of(request)
        settled = asyncio.Event()
        async with self._taking:
            record = await self._store.write(
                note_action, request, by, time.time(), secret_hash=secret_hash, undoes=undoes
            )
            if not request.IN_BOOKS:
                self._settled[record.number] = settled
                is_soon = await self._begin(record)
        if request.IN_BOOKS:
            await self.renew_tokens()
        elif is_soon:
            record = await self._outcome(record.number, settled)
        self._tell(record)
        return ActionResult(record=record, secret=secret if record.outcome is ActionOutcome.DONE else "")

    async def undo(self, number: int, by: Actor) -> ActionResult:
        """Carry out the action that undoes action `number`. Raises NoSuchActionError if there is none, and the errors
        of `act`."""
        record = await self._store.read(find_action, number)
        if record is None:
            raise NoSuchActionError(f"There is no action {number}.")
        undo = taking_back(record.action, record.request, record.before)
        if undo is None or record.outcome is not ActionOutcome.DONE:
            raise NoSuchActionError(f"Action {number} ({record.action}, {record.outcome}) cannot be taken back.")
        if await self._store.read(was_undone, number):
            raise NoSuchActionError(f"Action {number} was taken back already.")
        return await self.act(undo.action, undo.model_dump(mode="json"), by, undoes=number)

    async def log(self, *, limit: int, before: int | None) -> list[ActionRecord]:
        return await asyncio.to_thread(self._store.store.read, read_action_log, limit=limit, before=before)

    async def tokens(self) -> list[ApiToken]:
        return await asyncio.to_thread(self._store.store.read, read_api_tokens)

    def settled(self, number: int) -> None:
        """Wake the request that waits for this action: the action's result is in the database now."""
        if number in self._settled:
            self._settled.pop(number).set()
        self._changes.notify()

    async def _outcome(self, number: int, settled: asyncio.Event) -> ActionRecord:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await settled.wait()
        self._settled.pop(number, None)
        found = await self._store.read(find_action, number)
        assert found is not None
        return found

    async def _begin(self, record: ActionRecord) -> bool:
        """Begin the action. Return True if its result is stored, or will be soon; False if the result takes long, as
        for an evaluation."""
        self._taken.add(record.number)
        try:
            request = request_of(record.action, record.request)
        except WrongRequestError as error:  # Another version of this software stored the action.
            await self._settle(ActionSettled(number=record.number, done=False, detail=str(error)))
            return True
        if (asked := asked_of(record.number, request)) is not None:
            await self._queue.put(asked)
            return True
        if isinstance(request, EvaluateNow):
            refusal = self._due.want(request.version, action=record.number)
            if not refusal:
                self._settled.pop(record.number, None)
                return False
            await self._settle(ActionSettled(number=record.number, done=False, detail=refusal))
            return True
        try:
            detail, after = await self._do(request)
        except (EchoError, OSError) as error:
            await self._settle(ActionSettled(number=record.number, done=False, detail=str(error)))
        else:
            await self._settle(ActionSettled(number=record.number, done=True, detail=detail, after=after))
        return True

    async def _do(self, request: AnyRequest) -> tuple[str, Any]:
        """Carry out a request that concerns neither the coordinator nor evaluations. Return its result as text and as a
        value."""
        match request:
            case Export(version=version):
                path, exported = await asyncio.to_thread(self._export, version)
                return f"It is in {path}.", exported
            case RotateRunKey():
                self._run_keys.rotate_key()
                return "", None
            case RotateOperatorToken():
                self._guard.rotate_token()
                return f"The new token is in {self._directory.operator_token}.", None
            case _:
                raise AssertionError(f"{request.action} is carried out elsewhere")

    def _export(self, version: int | None) -> tuple[Path, int]:
        newest = max(self._directory.adapter_versions(), default=0)
        path = self._directory.root / "exports" / f"v{version or newest:06d}"
        return path, export_adapter(self._directory, path, policy_version=version)

    async def _settle(self, settled: ActionSettled) -> None:
        await self._store.write(settle_action, settled, time.time())
        self.settled(settled.number)

    async def renew_tokens(self) -> None:
        """Load the API tokens from the database if they have changed."""
        known = await self._store.read(read_num_api_tokens)
        if known != self._known_tokens:
            self._guard.tokens.renew(await self._store.read(read_api_tokens))
            self._known_tokens = known

    def _tell(self, record: ActionRecord) -> None:
        fields = ", ".join(f"{name} {value}" for name, value in record.request.items() if value is not None)
        what = f"{record.action} {fields}".strip()
        log.info("%s: %s, by %s (%s)", what, record.outcome, record.who, record.via)
        self._changes.notify()


def asked_of(number: int, request: AnyRequest) -> OperatorAsked | NodeVouchedFor | None:
    """Return the event with which the coordinator carries out this action; None if the action does not concern the
    coordinator."""
    what: str
    value: str | float = ""
    match request:
        case Pause():
            what, value = LiveSetting.LEASING, "paused"
        case Drain():
            what, value = LiveSetting.LEASING, "draining"
        case Resume():
            what, value = LiveSetting.LEASING, "open"
        case SetMaxStaleness():
            what, value = LiveSetting.MAX_STALENESS, request.value
        case SetPublishEvery():
            what, value = LiveSetting.PUBLISH_EVERY, request.value
        case SetLearningRate():
            what, value = LiveSetting.LEARNING_RATE, request.value
        case SetObjective():
            what, value = LiveSetting.OBJECTIVE, request.value
        case SetSpendCap():
            what, value = LiveSetting.SPEND_CAP, request.value
        case PublishNow():
            what = PUBLISH_NOW
        case TrustNode() | DistrustNode():
            return NodeVouchedFor(number=number, node_id=request.node, is_trusted=isinstance(request, TrustNode))
        case _:
            return None
    return OperatorAsked(number=number, what=what, value=value)
