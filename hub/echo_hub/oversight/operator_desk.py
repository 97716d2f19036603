"""Where all that an operator wants done arrives, whichever door it came by, and is carried out.

    page, JSON API ──> act ──┐
    echo-hub act ──> books ──┴─> the coordinator, or a part of the hub ──> books: done, or refused and why

The books have an action before anything of it is done, and what became of it together with what it has changed. So a
hub that dies in between does it at its next start, and an action that was settled is never done again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Final

from echo_hub.actions.records import ActionRecord, Actor, ApiToken, Outcome, is_good_for
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
from echo_hub.core.effects import ActionSettled
from echo_hub.core.events import NodeVouchedFor, OperatorAsked
from echo_hub.core.operating import PUBLISH_NOW, Setting
from echo_hub.dashboard.access.guard import Guard
from echo_hub.dashboard.actions import Answered, ForbiddenError, NoSuchActionError
from echo_hub.lifecycle.export import export_adapter
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
"""How often the books are asked what commands want done, and whether there are other tokens."""
PATIENCE_S: Final = 10.0
"""A door waits so long for what becomes of an action; then it says that it is still wanted."""


class Desk:
    """`report` tells the coordinator; `evaluate` begins an evaluation (`Evaluations.want`); `rotate_run_key` does that;
    `changed` is called when pages have something new to show."""

    def __init__(
        self,
        store: AsyncStore,
        directory: RunDirectory,
        *,
        guard: Guard,
        report: Callable[[OperatorAsked | NodeVouchedFor], Awaitable[None]],
        evaluate: Callable[[int | None], tuple[int, str]],
        rotate_run_key: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._store = store
        self._directory = directory
        self._guard = guard
        self._report = report
        self._evaluate = evaluate
        self._rotate_run_key = rotate_run_key
        self._changed = changed
        self._taken: set[int] = set()
        """Actions that were begun since the hub's start, by their numbers: none is begun twice."""
        self._taking = asyncio.Lock()
        self._settled: dict[int, asyncio.Event] = {}
        """Those that somebody waits for."""
        self._evaluating: dict[int, set[int]] = {}
        """Actions that wait for the evaluation of a version."""
        self._known_tokens: tuple[int, int] | None = None

    async def run(self) -> None:
        """Does for ever what commands have noted in the books, and keeps the tokens as they are there."""
        while True:
            await self._renew_tokens()
            async with self._taking:
                for record in await self._store.read(read_wanted_actions):
                    if record.number not in self._taken:
                        await self._begin(record)
            await asyncio.sleep(LOOK_S)

    async def act(
        self, action: str, fields: Mapping[str, Any], by: Actor, *, strict: bool = False, undoes: int | None = None
    ) -> Answered:
        """Notes the action, has it done and waits a while for what becomes of it. Raises WrongRequestError and
        ForbiddenError, of which nothing is noted."""
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
            await self._renew_tokens()
        elif is_soon:
            record = await self._outcome(record.number, settled)
        self._tell(record)
        return Answered(record=record, secret=secret if record.outcome is Outcome.DONE else "")

    async def undo(self, number: int, by: Actor) -> Answered:
        """Does what takes the action back. Raises NoSuchActionError where nothing does, and what `act` raises."""
        record = await self._store.read(find_action, number)
        if record is None:
            raise NoSuchActionError(f"There is no action {number}.")
        undo = taking_back(record.action, record.request, record.before)
        if undo is None or record.outcome is not Outcome.DONE:
            raise NoSuchActionError(f"Action {number} ({record.action}, {record.outcome}) cannot be taken back.")
        if await self._store.read(was_undone, number):
            raise NoSuchActionError(f"Action {number} was taken back already.")
        return await self.act(undo.action, undo.model_dump(mode="json"), by, undoes=number)

    async def log(self, *, limit: int, before: int | None) -> list[ActionRecord]:
        return await asyncio.to_thread(self._store.store.read, read_action_log, limit=limit, before=before)

    async def tokens(self) -> list[ApiToken]:
        return await asyncio.to_thread(self._store.store.read, read_api_tokens)

    def settled(self, number: int) -> None:
        """Of this action the books have what became of it."""
        if number in self._settled:
            self._settled.pop(number).set()
        self._changed()

    async def evaluated(self, policy_version: int) -> None:
        """The figures of this version are in the books."""
        for number in self._evaluating.pop(policy_version, ()):
            await self._settle(ActionSettled(number=number, done=True, after=policy_version))

    async def _outcome(self, number: int, settled: asyncio.Event) -> ActionRecord:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await settled.wait()
        self._settled.pop(number, None)
        found = await self._store.read(find_action, number)
        assert found is not None
        return found

    async def _begin(self, record: ActionRecord) -> bool:
        """Has it done. Whether what becomes of it is known soon."""
        self._taken.add(record.number)
        try:
            request = request_of(record.action, record.request)
        except WrongRequestError as error:  # Noted by another version of this software.
            await self._settle(ActionSettled(number=record.number, done=False, detail=str(error)))
            return True
        if (asked := asked_of(record.number, request)) is not None:
            await self._report(asked)
            return True
        if isinstance(request, EvaluateNow):
            version, refusal = self._evaluate(request.version)
            if not refusal:
                self._evaluating.setdefault(version, set()).add(record.number)
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
        """What came of it, in words and as a value."""
        match request:
            case Export(version=version):
                path, exported = await asyncio.to_thread(self._export, version)
                return f"It is in {path}.", exported
            case RotateRunKey():
                self._rotate_run_key()
                return "", None
            case RotateOperatorToken():
                self._guard.rotate_token()
                return f"The new token is in {self._directory.operator_token}.", None
            case _:
                raise AssertionError(f"{request.action} is done elsewhere")

    def _export(self, version: int | None) -> tuple[Path, int]:
        newest = max(self._directory.adapter_versions(), default=0)
        path = self._directory.root / "exports" / f"v{version or newest:06d}"
        return path, export_adapter(self._directory, path, policy_version=version)

    async def _settle(self, settled: ActionSettled) -> None:
        await self._store.write(settle_action, settled, time.time())
        self.settled(settled.number)

    async def _renew_tokens(self) -> None:
        known = await self._store.read(read_num_api_tokens)
        if known != self._known_tokens:
            self._guard.tokens.renew(await self._store.read(read_api_tokens))
            self._known_tokens = known

    def _tell(self, record: ActionRecord) -> None:
        """On the page's log, and in the hub's."""
        fields = ", ".join(f"{name} {value}" for name, value in record.request.items() if value is not None)
        what = f"{record.action} {fields}".strip()
        log.info("%s: %s, by %s (%s)", what, record.outcome, record.who, record.via)
        self._changed()


def asked_of(number: int, request: AnyRequest) -> OperatorAsked | NodeVouchedFor | None:
    """What the coordinator is asked for; None: it has no part in this."""
    what: str
    value: str | float = ""
    match request:
        case Pause():
            what, value = Setting.LEASING, "paused"
        case Drain():
            what, value = Setting.LEASING, "draining"
        case Resume():
            what, value = Setting.LEASING, "open"
        case SetMaxStaleness():
            what, value = Setting.MAX_STALENESS, request.value
        case SetPublishEvery():
            what, value = Setting.PUBLISH_EVERY, request.value
        case SetLearningRate():
            what, value = Setting.LEARNING_RATE, request.value
        case SetObjective():
            what, value = Setting.OBJECTIVE, request.value
        case SetSpendCap():
            what, value = Setting.SPEND_CAP, request.value
        case PublishNow():
            what = PUBLISH_NOW
        case TrustNode() | DistrustNode():
            return NodeVouchedFor(number=number, node_id=request.node, is_trusted=isinstance(request, TrustNode))
        case _:
            return None
    return OperatorAsked(number=number, what=what, value=value)
