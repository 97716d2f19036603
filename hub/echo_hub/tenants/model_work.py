"""Carry out training requests on tenants' models: take requests in order, at most one of each tenant at a time, and
commit each outcome.

    journal row committed → its turn → computed by the process → outcome, journal and model committed together → next

Requests of several tenants are in the process at once. It shares its time between them by micro-batches, so a tenant
with a large request does not hold up the others.

If the process dies, it is started again, and the model comes back from its checkpoint and journal. Then the request is
computed again: nothing of it was committed. If the process held several requests, it now computes each request again
alone. If one request alone kills the process `DEATHS` times in a row, the request fails, and later requests run.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Final

from echo_hub.store.tenant_reading import find_journal_row
from echo_hub.store.tenant_records import (
    CheckpointRemoved,
    JournalDropped,
    JournalReplaced,
    ModelCovered,
    ModelMoved,
    TenantRecord,
    TenantTallied,
)
from echo_hub.tenants.computing import ModelComputer
from echo_hub.tenants.core import TenantCore
from echo_hub.tenants.gradient_state import AFTER_FAILURE, JournalKind
from echo_hub.tenants.order import GivenUp, ModelOrders
from echo_hub.tenants.outcomes import Failed, ModelCreated, Outcome, StepTaken, WeightsLoaded, WeightsSaved
from echo_hub.tenants.recovery import Recovery
from echo_hub.tenants.refusal import Refusal
from echo_hub.tenants.requests import AdamStep, ForwardBackward, WeightsKind
from echo_hub.tenants.sessions import LiveModel, TrainingArrival
from echo_hub.tenants.stored import CreateWork, LoadWork, SaveWork, Work, unpack_stored
from echo_hub.tenants.version_saves import VersionSaves
from echo_hub.tenants.weights import Weights
from echo_shared.errors import EchoError
from echo_shared.process.child import ChildExited

log = logging.getLogger(__name__)

DEATHS: Final = 3
"""Number of consecutive process deaths at one request after which the request fails."""
DAY_S: Final = 86_400
_SPOILED: Final = (
    "An earlier forward_backward of this step failed or never came, so its gradient is incomplete. "
    "The gradient was dropped, and the weights did not change. Send the data of this step again."
)
_WORKS: Final = {
    JournalKind.CREATE: CreateWork,
    JournalKind.PASS: ForwardBackward,
    JournalKind.FORWARD: ForwardBackward,
    JournalKind.STEP: AdamStep,
    JournalKind.SAVE: SaveWork,
    JournalKind.LOAD: LoadWork,
}


class ModelWork:
    """Runs training requests. `arrive` adds one that is committed."""

    def __init__(self, core: TenantCore, *, recovery: Recovery, weights: Weights, saves: VersionSaves) -> None:
        self._sessions = core.sessions
        self._store = core.store
        self._writer = core.writer
        self._futures = core.futures
        self._host = core.host
        self._recovery = recovery
        self._weights = weights
        self._saves = saves
        self._orders = ModelOrders()
        self._forgotten: list[str] = []
        self._news = asyncio.Event()
        self._running: dict[str, str] = {}
        """For each tenant with a running request: the model of the request."""
        self._together: set[str] = set()
        """Models whose running request shared the process with another request."""
        self._suspects: set[str] = set()
        """Models whose request must be computed alone: the process died with several requests in it, and one of these
        may be the cause."""

    def add(self, model: LiveModel) -> None:
        self._orders.add(model.model_id, model.order, tenant_id=model.tenant_id)

    def arrive(self, model: LiveModel, seq_id: int, arrival: TrainingArrival) -> None:
        model.arrivals[seq_id] = arrival
        model.order.arrive(seq_id, time.monotonic())
        self._news.set()

    def remove(self, model_id: str) -> None:
        """Forget a model, because its session has ended."""
        self._orders.remove(model_id)
        self._forgotten.append(model_id)
        self._news.set()

    def reason(self, owner_id: str) -> str:
        """Return why the requests of a model wait, in one sentence; "" = they are being computed."""
        order = self._orders.of(owner_id)
        if order is None:
            return ""
        if order.gap_ends_at is not None:
            return f"The request with seq_id {order.next_seq} has not come yet, so later ones wait for it."
        return self._host.trouble

    async def run(self) -> None:
        """Carry out requests until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._news.clear()
                await self._forget()
                for gap in self._orders.give_up(time.monotonic()):
                    await self._give_up(gap)
                turn = self._take()
                if turn is None:
                    await self._wait()
                    continue
                model = self._sessions.any_model(turn[0])
                assert model is not None, "a model is removed from the orders together with its session"
                self._running[model.tenant_id] = model.model_id
                if len(self._running) > 1:
                    self._together.update(self._running.values())
                tasks.create_task(self._run(model, turn[1]), name=f"work-{model.model_id}")

    def _take(self) -> tuple[str, int] | None:
        """Return the next request; None if none may run now."""
        if self._suspects and not self._running:
            turn = self._orders.take(among=self._suspects)
            if turn is not None:
                return turn
            self._suspects.clear()  # Their sessions have ended.
        return None if self._suspects else self._orders.take(self._running)

    async def _run(self, model: LiveModel, seq_id: int) -> None:
        try:
            await self._serve(model, seq_id)
        finally:
            del self._running[model.tenant_id]
            self._together.discard(model.model_id)
            self._news.set()

    async def _wait(self) -> None:
        ends = self._orders.next_gap_end()
        try:
            async with asyncio.timeout(None if ends is None else max(0.0, ends - time.monotonic())):
                await self._news.wait()
        except TimeoutError:
            pass

    async def _serve(self, model: LiveModel, seq_id: int) -> None:
        arrival = model.arrivals[seq_id]
        if arrival.kind is None or arrival.kind is JournalKind.SPOILED:
            await self._pass_by(model, seq_id, arrival)
            return
        computer = await self._host.get()
        try:
            if not computer.holds(model.model_id):
                await self._recovery.restore(model, computer)
            work = await self._work(model, seq_id, arrival.kind)
            outcome, records = await self._tried(model, seq_id, arrival, work, computer)
        except ChildExited as error:
            await self._host.lost(computer)
            if model.model_id in self._together:
                self._suspects.add(model.model_id)
                return
            model.deaths += 1
            if model.deaths < DEATHS:
                return
            outcome = Failed(error=f"The process died {DEATHS} times at this request: {error}", category="server")
            work, records = None, ()
        except Refusal as error:
            outcome = Failed(error=str(error), category="user")
            work, records = None, ()
        except EchoError as error:
            log.error("model %s cannot be restored: %s", model.model_id, error)
            outcome = Failed(error=f"The model cannot be restored: {error}", category="server")
            work, records = None, ()
        except Exception as error:
            log.exception("model %s cannot be computed", model.model_id)
            outcome = Failed(error=f"The hub failed: {error!r}", category="unknown")
            work, records = None, ()
        model.deaths = 0
        self._suspects.discard(model.model_id)
        await self._finish(model, seq_id, arrival, outcome, records, work)

    async def _work(self, model: LiveModel, seq_id: int, kind: JournalKind) -> Work:
        row = await self._store.read(find_journal_row, model.model_id, seq_id)
        assert row is not None, "a request's journal row is committed together with it"
        return await asyncio.to_thread(unpack_stored, row.body, _WORKS[kind])

    async def _tried(
        self, model: LiveModel, seq_id: int, arrival: TrainingArrival, work: Work, computer: ModelComputer
    ) -> tuple[Outcome | None, Sequence[TenantRecord]]:
        """Compute a request. Return its outcome and further records to commit; None = another task commits the outcome
        later (`version_saves`)."""
        is_intact = arrival.kind in (JournalKind.FORWARD, JournalKind.SAVE)
        try:
            return await self._computed(model, seq_id, arrival, work, computer)
        except ChildExited:
            raise
        except Refusal as error:
            failed = Failed(error=str(error), category="user")
            is_intact = arrival.kind is not JournalKind.LOAD
        except EchoError as error:
            log.warning("a request of model %s failed: %s", model.model_id, error)
            failed = Failed(error=str(error), category="server")
        except Exception as error:
            log.exception("a request of model %s failed", model.model_id)
            failed = Failed(error=f"The hub failed: {error!r}", category="unknown")
        if not is_intact and computer.holds(model.model_id):
            # The request may have changed a part of the model. Load it again at its next turn.
            await computer.forget(model.model_id)
        elif arrival.kind in AFTER_FAILURE:
            await computer.drop_gradient(model.model_id)
        return failed, ()

    async def _computed(
        self, model: LiveModel, seq_id: int, arrival: TrainingArrival, work: Work, computer: ModelComputer
    ) -> tuple[Outcome | None, Sequence[TenantRecord]]:
        match work:
            case CreateWork():
                await computer.create(model.model_id, work.lora)
                return ModelCreated(model_id=model.model_id), ()
            case ForwardBackward():
                result = await computer.forward_backward(model.model_id, work)
                return result, [self._tally(model, sum(len(datum.input_ids) for datum in work.data))]
            case AdamStep():
                if model.gradient.is_spoiled:
                    await computer.drop_gradient(model.model_id)
                    return Failed(error=_SPOILED, category="user"), ()
                return StepTaken(metrics=await computer.optim_step(model.model_id, work)), ()
            case SaveWork():
                return await self._save(model, arrival, work, computer)
            case LoadWork():
                return await self._load(model, seq_id, work, computer)
            case _:
                raise AssertionError(f"{type(work).__name__} is not a model's work")

    async def _save(
        self, model: LiveModel, arrival: TrainingArrival, work: SaveWork, computer: ModelComputer
    ) -> tuple[Outcome | None, Sequence[TenantRecord]]:
        replaced = await self._weights.check_free(work)
        if work.path:  # Saves that were queued since the request was accepted count too.
            await self._weights.check_bytes(model.tenant_id)
        if work.weights is WeightsKind.SAMPLER:
            version = await self._weights.export(model, arrival.request_id, computer)
            return None, [version]
        row = await self._weights.save(model, work, computer)
        records = self._weights.replacing(row, replaced)
        if work.weights is WeightsKind.TRAINING and model.gradient.clean_seq > model.covered_seq:
            records.append(await self._recovery.write(model, computer, model.gradient.clean_seq))
        return WeightsSaved(path=work.path), records

    async def _load(
        self, model: LiveModel, seq_id: int, work: LoadWork, computer: ModelComputer
    ) -> tuple[Outcome, Sequence[TenantRecord]]:
        row, _ = await self._weights.find_for_training(model.tenant_id, work.path)
        await computer.load(model.model_id, self._weights.directory(row), optimizer=work.optimizer)
        # The loaded weights may be deleted, so the journal cannot be replayed over this point.
        covered = await self._recovery.write(model, computer, seq_id)
        steps = row.steps if work.optimizer else 0
        return WeightsLoaded(path=work.path, model_id=model.model_id, steps=steps), [covered]

    async def _finish(
        self,
        model: LiveModel,
        seq_id: int,
        arrival: TrainingArrival,
        outcome: Outcome | None,
        records: Sequence[TenantRecord],
        work: Work | None,
    ) -> None:
        """Commit a request's outcome, then count the request as done in its model's order."""
        kind = arrival.kind
        assert kind is not None
        failed = isinstance(outcome, Failed)
        became = AFTER_FAILURE.get(kind) if failed else kind
        steps = model.steps + (kind is JournalKind.STEP and not failed)
        if isinstance(outcome, WeightsLoaded):
            steps = outcome.steps
        now = time.time()
        moved = ModelMoved(model_id=model.model_id, next_seq=seq_id + 1, steps=steps, last_request_at=now)
        all_records = [*records, moved, *self._journal(model, seq_id, kind, outcome, became)]
        if outcome is None:
            await self._writer.commit(*all_records)
        else:
            await self._futures.end(arrival.request_id, outcome, *all_records)
        self._note_done(model, seq_id, became)
        model.steps = steps
        for record in records:
            if isinstance(record, ModelCovered):
                await self._recovery.covered(model, record)
            elif isinstance(record, CheckpointRemoved):
                await self._weights.remove_files(record)
        if outcome is None:
            assert isinstance(work, SaveWork)
            self._saves.begin(model, arrival.request_id, seq_id, work, records)
        if became in (JournalKind.PASS, JournalKind.STEP):
            model.bytes_since_cover += arrival.num_bytes
        if kind is JournalKind.STEP and not failed:
            model.steps_since_cover += 1
            await self._cover_if_due(model)

    @staticmethod
    def _journal(
        model: LiveModel, seq_id: int, kind: JournalKind, outcome: Outcome | None, became: JournalKind | None
    ) -> list[TenantRecord]:
        """Return the records that change, keep or delete the request's journal row. Only passes and steps must be
        replayed."""
        if kind is JournalKind.CREATE and became is not None:
            return [ModelCovered(model_id=model.model_id, covered_seq=seq_id, directory="")]
        if became in (JournalKind.PASS, JournalKind.STEP) or outcome is None:
            return []
        if became in (JournalKind.SPOILED, JournalKind.DROPPED):
            return [JournalReplaced(model_id=model.model_id, seq_id=seq_id, kind=became)]
        return [JournalDropped(model_id=model.model_id, seq_id=seq_id)]

    def _note_done(self, model: LiveModel, seq_id: int, became: JournalKind | None) -> None:
        if became is not None:
            model.gradient.note(became, seq_id)
        if became is JournalKind.CREATE:
            model.covered_seq = seq_id
        model.order.finish(seq_id, time.monotonic())
        del model.arrivals[seq_id]

    async def _cover_if_due(self, model: LiveModel) -> None:
        computer = self._host.running()
        if computer is None or not self._recovery.is_due(model):
            return
        try:
            await self._recovery.cover(model, computer)
        except ChildExited:
            await self._host.lost(computer)
        except EchoError as error:
            log.error("no checkpoint of model %s could be written: %s", model.model_id, error)

    async def _pass_by(self, model: LiveModel, seq_id: int, arrival: TrainingArrival) -> None:
        """Count a refused request as done: it has nothing to compute."""
        if arrival.kind is JournalKind.SPOILED:
            await self._drop_gradient(model)
        moved = ModelMoved(
            model_id=model.model_id, next_seq=seq_id + 1, steps=model.steps, last_request_at=model.last_request_at
        )
        await self._writer.commit(moved)
        self._note_done(model, seq_id, arrival.kind)

    async def _give_up(self, gap: GivenUp) -> None:
        """Fail the requests that waited for one that the client never sent."""
        model = self._sessions.any_model(gap.model_id)
        if model is None:
            return  # Its session has ended meanwhile.
        text = (
            f"The request with seq_id {gap.missing} of this model never came, so this one cannot run. "
            "Save your data, make a new model from the last saved weights, and go on from there."
        )
        await self._drop_gradient(model)
        await self._writer.commit(
            JournalReplaced(model_id=model.model_id, seq_id=gap.missing, kind=JournalKind.SPOILED)
        )
        model.gradient.note(JournalKind.SPOILED, gap.missing)
        for seq_id in gap.failed:
            arrival = model.arrivals.pop(seq_id)
            became = AFTER_FAILURE.get(arrival.kind) if arrival.kind is not None else None
            moved = ModelMoved(
                model_id=model.model_id, next_seq=seq_id + 1, steps=model.steps, last_request_at=model.last_request_at
            )
            change: TenantRecord = JournalDropped(model_id=model.model_id, seq_id=seq_id)
            if became is not None:
                change = JournalReplaced(model_id=model.model_id, seq_id=seq_id, kind=became)
                model.gradient.note(became, seq_id)
            if arrival.kind is None or arrival.kind is JournalKind.SPOILED:
                await self._writer.commit(moved)
            else:
                await self._futures.end(arrival.request_id, Failed(error=text, category="user"), moved, change)

    async def _drop_gradient(self, model: LiveModel) -> None:
        computer = self._host.running()
        if computer is not None and computer.holds(model.model_id):
            try:
                await computer.drop_gradient(model.model_id)
            except ChildExited:
                await self._host.lost(computer)

    async def _forget(self) -> None:
        """Free the memory of the models whose sessions have ended, and delete their own checkpoints."""
        running = self._running.values()
        over = [model_id for model_id in self._forgotten if model_id not in running]
        self._forgotten = [model_id for model_id in self._forgotten if model_id in running]
        for model_id in over:
            computer = self._host.running()
            if computer is not None and computer.holds(model_id):
                try:
                    await computer.forget(model_id)
                except ChildExited:
                    await self._host.lost(computer)
            await self._recovery.forget(model_id)

    @staticmethod
    def _tally(model: LiveModel, tokens: int) -> TenantTallied:
        day = int(time.time() // DAY_S)
        return TenantTallied(tenant_id=model.tenant_id, day=day, requests=1, trained_tokens=tokens)
