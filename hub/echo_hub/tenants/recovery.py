"""Checkpoints that the hub takes of tenants' models, and the replay of the requests in the journal that came after
them.

Only the process's memory holds a model's gradient. After a death of process or hub, `Recovery` loads the model's
newest checkpoint and repeats later requests from the journal. The database holds their outcomes already, so the
replay's results are discarded.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Final

from echo_hub.store.tenant_reading import find_journal_row, read_journal_marks
from echo_hub.store.tenant_records import ModelCovered
from echo_hub.tenants.computing import ModelComputer
from echo_hub.tenants.core import TenantCore
from echo_hub.tenants.gradient_state import GradientState, JournalKind, replayed
from echo_hub.tenants.refusal import Refusal, RefusalKind
from echo_hub.tenants.requests import AdamStep, ForwardBackward
from echo_hub.tenants.sessions import LiveModel, directory_name
from echo_hub.tenants.stored import unpack_stored

log = logging.getLogger(__name__)

_FOLDER: Final = "tenants/models"
COVER_BYTES: Final = 64_000_000
"""Bytes of a model's journal above which the hub takes a checkpoint after the next step, whatever the settings say."""


class Recovery:
    """Takes and loads the hub's own checkpoints of models."""

    def __init__(self, core: TenantCore, *, checkpoint_every: int) -> None:
        self._root = core.directory.root
        self._store = core.store
        self._writer = core.writer
        self._checkpoint_every = checkpoint_every

    async def restore(self, model: LiveModel, computer: ModelComputer) -> None:
        """Bring the model back into the process, in its state after its last finished request.

        Raises ChildExited, Refusal if the model was never made, and what the process raises if it cannot load or
        compute the model.
        """
        if model.order.next_seq > 0 and model.covered_seq < 0:
            raise Refusal(
                RefusalKind.INVALID,
                "The model was never made: its first request failed.",
                got=model.model_id,
                do="Make a new model.",
            )
        marks = [
            (seq_id, JournalKind(kind), size)
            for seq_id, kind, size in await self._store.read(read_journal_marks, model.model_id)
            if model.covered_seq < seq_id < model.order.next_seq
        ]
        if model.order.next_seq > 0:  # Request 0 makes the model.
            if model.directory:
                await computer.load(model.model_id, self._root / model.directory, optimizer=True)
            else:
                await computer.create(model.model_id, model.lora)
        again = replayed([(seq_id, kind) for seq_id, kind, _ in marks])
        for seq_id, kind in again:
            row = await self._store.read(find_journal_row, model.model_id, seq_id)
            assert row is not None, "the journal keeps what no checkpoint covers"
            if kind is JournalKind.PASS:
                request = await asyncio.to_thread(unpack_stored, row.body, ForwardBackward)
                await computer.forward_backward(model.model_id, request)
            else:
                await computer.optim_step(model.model_id, unpack_stored(row.body, AdamStep))
        model.gradient = GradientState(model.covered_seq)
        for seq_id, kind, _ in marks:
            model.gradient.note(kind, seq_id)
        model.steps_since_cover = sum(kind is JournalKind.STEP for _, kind, _ in marks)
        model.bytes_since_cover = sum(size for _, _, size in marks)
        if again:
            log.info("computed %d requests of model %s again", len(again), model.model_id)

    def is_due(self, model: LiveModel) -> bool:
        """Return True if a checkpoint of the model is due after its newest step."""
        is_new = model.gradient.clean_seq > model.covered_seq
        is_far = model.steps_since_cover >= self._checkpoint_every or model.bytes_since_cover >= COVER_BYTES
        return is_new and is_far

    async def write(self, model: LiveModel, computer: ModelComputer, covered_seq: int) -> ModelCovered:
        """Write a checkpoint of the model's present weights, and return the record to commit. Call `covered` after the
        commit."""
        relative = f"{_FOLDER}/{directory_name(model.model_id)}/after-{covered_seq}"
        await computer.save(model.model_id, self._root / relative)
        return ModelCovered(model_id=model.model_id, covered_seq=covered_seq, directory=relative)

    async def covered(self, model: LiveModel, record: ModelCovered) -> None:
        """Note a committed checkpoint, and delete the previous one."""
        former, model.directory = model.directory, record.directory
        model.covered_seq = record.covered_seq
        model.steps_since_cover = model.bytes_since_cover = 0
        if former and former != record.directory:
            await self._delete(self._root / former)

    async def cover(self, model: LiveModel, computer: ModelComputer) -> None:
        """Write and commit a checkpoint that covers all requests up to the point where the gradient was last empty."""
        record = await self.write(model, computer, model.gradient.clean_seq)
        await self._writer.commit(record)
        await self.covered(model, record)

    async def forget(self, model_id: str) -> None:
        """Delete the checkpoints of a model whose session has ended."""
        await self._delete(self._root / _FOLDER / directory_name(model_id))

    async def _delete(self, path: Path) -> None:
        try:
            await asyncio.to_thread(shutil.rmtree, path)
        except FileNotFoundError:
            pass
        except OSError as error:
            log.warning("The old checkpoint %s cannot be deleted now: %s", path, error)
