"""Runs the sampling engine for the work loop: one child process at a time, whose reports become events."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, assert_never

from echo_node.backends.base import OUT_OF_MEMORY, EngineSettings, GroupFailed
from echo_node.backends.gpu_cage import GPU_UNUSABLE, GpuCages
from echo_node.backends.measure import widths_up_to
from echo_node.backends.process import STOPPED, Cancelled, DrawnTokens, EngineChild, Finished, Prepared
from echo_node.core import events
from echo_node.core.events import (
    CompletionScored,
    EngineLost,
    EngineReady,
    Incoming,
    LeaseCancelled,
    LossCause,
    PolicyPrepared,
    RolloutsDrawn,
    RolloutsFinished,
)
from echo_node.engine.choosing import EngineChooser
from echo_node.engine.fitting import place_of
from echo_node.engine.speeds import SpeedBook, Speeds
from echo_node.engine.widths import EngineMemoryCase, Widths
from echo_node.host.base_forms import (
    CONVERTING,
    came_as_gguf,
    conversion_progress,
    drop_replaced,
    keep_one_form,
    want_weights,
)
from echo_node.host.priority import Priority
from echo_shared.cage.description import CageMode, Held
from echo_shared.delta.base_weights import NO_WEIGHTS, weights_of
from echo_shared.errors import BackendError, StorageError
from echo_shared.process.child import ChildExited
from echo_shared.process.supervised import ChildLimits
from echo_shared.sampling.interface import GroupRequest
from echo_shared.sampling.prefix_cache import KeptKeys
from echo_shared.sampling.scoring import Scored, ScoreRequest
from echo_shared.wire.messages.engines import precision_of_file
from echo_shared.wire.messages.fields import printable_line

log = logging.getLogger(__name__)

_MOST_SAID: Final = 400
"""Maximum length of a reason sent to the hub, in characters."""
_CAUSES: Final[dict[str, LossCause]] = {OUT_OF_MEMORY: "out_of_memory", STOPPED: "stopped"}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFiles:
    base_dir: Path
    base_content: str
    """Id of the base model's content."""
    policies_dir: Path
    """Directory that holds the adapter of each policy version, in a directory of its own."""
    derived_dir: Path
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineParts:
    """Parts of the node that every engine needs, whatever its base model."""

    chooser: EngineChooser
    widths: Widths
    speeds: SpeedBook
    settings: EngineSettings
    limits: ChildLimits
    priority: Priority
    bench_seconds: float
    """Seconds of the measurement when an engine is first used on a base model; 0 = no measurement."""
    cage: CageMode
    cages: GpuCages
    inbox: asyncio.Queue[Incoming]
    device: str = ""
    """Name of the device in the setting `devices`; "" = the device that the node has chosen itself."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while one of the node's engines starts and is measured. Engines share the converted files of the base model,
    and their speeds are measured one at a time.
    """


def _for_the_hub(what: str) -> str:
    """Shorten a reason to `_MOST_SAID` characters, because an engine may report pages of text."""
    return printable_line(what)[:_MOST_SAID]


@dataclass(frozen=True, slots=True)
class _Opened:
    child: EngineChild
    place: EngineMemoryCase
    speeds: Speeds | None
    limit: int
    """Maximum number of rollouts at the same time that fit into memory, from earlier failures; 0 = unknown."""


class EngineSupervisor:
    """One engine process on one base model. Call `run` once, and the other methods while it runs.

    Calls have no effect before the process starts or after it ends; EngineLost reports the end.
    """

    def __init__(self, parts: EngineParts, files: EngineFiles) -> None:
        self._parts = parts
        self._files = files
        self._opening: asyncio.Task[_Opened] | None = None
        self._child: EngineChild | None = None
        self._width = 0
        """Requested width (rollouts at the same time) of the process; 0 = the engine chooses."""
        self._is_ended = False
        self._has_turn = False
        """True while this engine holds `EngineParts.turn`."""
        self._is_measuring = False

    @property
    def stage(self) -> str:
        """Sentence about what the engine does before its first work; empty = it is ready, or it is not running."""
        if self._is_measuring:
            return f"The engine is measured for about {self._parts.bench_seconds:.0f} s, once for this base model."
        return "The engine starts, and loads the model." if self._is_opening else ""

    @property
    def _is_opening(self) -> bool:
        return self._opening is not None and not self._opening.done()

    @property
    def conversion(self) -> tuple[int, int] | None:
        """(bytes written, total bytes, about) of the base model's conversion; None if none runs."""
        if not self._is_opening:
            return None
        files = self._files
        return conversion_progress(files.base_dir, files.derived_dir, self._parts.settings.precision)

    async def run(self, after_s: float, max_width: int) -> None:
        """Run one process from start to end. Its reports go to the inbox: EngineReady, results, and EngineLost at the
        end.

        A `max_width` above 0 is a new limit, learnt when memory ran out. The limit is stored once an engine has started
        with it: an engine that fails at every width has another fault.
        """
        try:
            opened = await self._opened(after_s, max_width)
            if opened is not None:
                await self._work(opened, max_width)
        finally:
            self._end_turn()

    async def _opened(self, after_s: float, max_width: int) -> _Opened | None:
        """Start the engine. After a failed start, report EngineLost and return None."""
        self._opening = asyncio.create_task(self._open(after_s, max_width), name="engine's start")
        if self._is_ended:
            self._opening.cancel()
        try:
            return await self._opening
        except asyncio.CancelledError:
            if not self._is_ended:
                raise
            self._end_turn()
            what = "The engine was ended before it was up."
            await self._parts.inbox.put(EngineLost(what=what, cause="stopped", device=self._parts.device))
        except BackendError as error:
            log.debug("The sampling engine does not start: %s", error)
            self._end_turn()
            await self._lost(error, self._width)
        return None

    async def _work(self, opened: _Opened, max_width: int) -> None:
        """Measure a started engine, and report its events until its end."""
        child = opened.child
        probe = asyncio.create_task(self._make_way(child), name="engine's probe")
        try:
            ready = await self._begin(opened, max_width)
            self._end_turn()
            await self._parts.inbox.put(ready)
            await self._tell(child)
        except BackendError as error:
            self._child = None
            self._end_turn()
            if not self._is_ended:
                log.debug("The sampling engine ended: %s", error)
            await child.stop()  # Free the engine's memory before the next engine starts.
            await self._lost(error, child.width)
        finally:
            self._child = None
            probe.cancel()
            await child.stop()

    def _end_turn(self) -> None:
        """Give up this engine's turn (`EngineParts.turn`), so that the node's next engine may start."""
        if self._has_turn:
            self._has_turn = False
            self._parts.turn.release()

    async def _begin(self, opened: _Opened, max_width: int) -> EngineReady:
        """Measure a started engine, if that is due, and return its EngineReady event. Raises BackendError."""
        child, speeds = opened.child, opened.speeds
        if max_width:
            await asyncio.to_thread(self._remember_limit, opened.place, max_width)
        if speeds is None and self._is_measurable and not opened.limit:
            speeds = await self._measure(child, opened.place)
        await self._keep_one_form(child)
        is_gguf = await asyncio.to_thread(came_as_gguf, self._files.base_dir)
        return self._ready(child, speeds, is_gguf=is_gguf)

    async def _open(self, after_s: float, max_width: int) -> _Opened:
        """Wait `after_s` seconds and for this engine's turn, keep the turn, and start. Raises BackendError."""
        await asyncio.sleep(after_s)
        await self._parts.turn.acquire()
        self._has_turn = True
        settings = self._parts.settings
        self._width = settings.width
        choice = await self._parts.chooser.decide()
        await self._check_form(choice.name)
        place = await asyncio.to_thread(self._place)
        limit = max_width or await asyncio.to_thread(self._known_limit, place)
        speeds = await asyncio.to_thread(self._parts.speeds.find, place, settings)
        wanted = settings.width or (0 if speeds is None else speeds.width)
        self._width = min(wanted or limit, limit or wanted)
        cage, policies = self._parts.cage, self._files.policies_dir
        terms = await asyncio.to_thread(self._parts.cages.terms, choice, cage, policies)
        self._child = await EngineChild.start(
            choice,
            base_dir=self._files.base_dir,
            derived_dir=self._files.derived_dir,
            log=self._files.log,
            settings=replace(settings, width=self._width),
            limits=self._parts.limits,
            priority=self._parts.priority,
            cage=terms,
        )
        return _Opened(self._child, place, speeds, limit)

    @property
    def pid(self) -> int | None:
        return None if self._child is None else self._child.pid

    @property
    def held(self) -> Held | None:
        """Protections of the engine's cage (sandbox) that the system enforces; None if no engine runs."""
        return None if self._child is None else self._child.held

    @property
    def kept(self) -> KeptKeys:
        """Memory and use of the keys and values that the engine keeps for later turns."""
        return KeptKeys() if self._child is None else self._child.kept

    def suspend(self) -> None:
        if self._child is not None:
            self._child.suspend()

    def resume(self) -> None:
        if self._child is not None:
            self._child.resume()

    async def end(self) -> None:
        """End the engine at once, in any state. EngineLost follows, with the cause `stopped`."""
        self._is_ended = True
        if self._child is not None:
            await self._child.end()
        elif self._opening is not None:
            self._opening.cancel()

    @property
    def _is_measurable(self) -> bool:
        """True if the engine should be measured. The measurement reads config.json, which a base model in a GGUF file
        lacks.
        """
        wanted = self._parts.settings.width == 0 and self._parts.bench_seconds > 0
        return wanted and (self._files.base_dir / "config.json").is_file()

    async def _tell(self, child: EngineChild) -> None:
        """Pass the engine's reports to the inbox until the engine ends, which raises BackendError."""
        inbox, device = self._parts.inbox, self._parts.device
        async for event in child.events():
            match event:
                case Finished(rollouts=rollouts):
                    rate = child.tokens_per_s
                    await inbox.put(RolloutsFinished(rollouts=rollouts, tokens_per_s=rate, device=device))
                case GroupFailed(lease_id=lease_id, what=what, code=code):
                    failed = events.LeaseFailed(lease_id=lease_id, what=_for_the_hub(what), code=code, device=device)
                    await inbox.put(failed)
                case DrawnTokens(parts=parts, for_hub=for_hub):
                    await inbox.put(RolloutsDrawn(parts=parts, for_hub=for_hub, device=device))
                case Scored():
                    await inbox.put(CompletionScored(scored=event, device=device))
                case Cancelled(lease_id=lease_id):
                    await inbox.put(LeaseCancelled(lease_id=lease_id, device=device))
                case Prepared(policy_version=version):
                    await inbox.put(PolicyPrepared(policy_version=version, device=device))
                case _:
                    assert_never(event)

    async def _check_form(self, backend: str) -> None:
        """Raise BackendError with the code NO_WEIGHTS if the engine reads weights that a converted file has replaced,
        or that were not fetched because another engine read the hub's GGUF file.

        This is checked before the engine's process starts, because the process would first import its library.
        """
        try:
            replaced = await asyncio.to_thread(drop_replaced, self._files.base_dir)
            is_gguf = await asyncio.to_thread(came_as_gguf, self._files.base_dir)
        except StorageError as error:
            raise BackendError(error.what, got=error.got, do=error.do, code=error.code) from error
        converts = backend == CONVERTING
        if (replaced and not converts) or (is_gguf and not (converts and self._parts.settings.precision == "auto")):
            weights_of(self._files.base_dir)

    async def _keep_one_form(self, child: EngineChild) -> None:
        """Delete the form of the base model (weights or converted file) that the engine does not read, unless this
        engine is a fallback.
        """
        if self._parts.chooser.is_fallback:
            return
        files = self._files
        try:
            await asyncio.to_thread(keep_one_form, files.base_dir, files.derived_dir, child.converted)
        except StorageError as error:
            log.warning("The base model takes more of the disk than the engine needs: %s", error)

    async def _can_come_again(self) -> bool:
        """Return True if the base model's weights are missing because this node itself deleted them. Their marker is
        then removed, so that they are fetched again.
        """
        try:
            return await asyncio.to_thread(want_weights, self._files.base_dir)
        except StorageError as error:
            log.warning("The base model cannot be fetched again: %s", error)
            return False

    async def _lost(self, error: BackendError, width: int) -> None:
        cause = _CAUSES.get(error.code, "died")
        if error.code == NO_WEIGHTS and await self._can_come_again():
            log.info("The engine needs the base model's weights, which are fetched again.")
            cause = "no_weights"
        what = f"{error.brief} {error.do or ''}" if error.code == GPU_UNUSABLE else error.brief
        what, device = _for_the_hub(what), self._parts.device
        await self._parts.inbox.put(EngineLost(what=what, cause=cause, width=width, code=error.code, device=device))

    async def _make_way(self, child: EngineChild) -> None:
        """End an engine on a fallback device once the preferred device is available again."""
        if self._parts.chooser.is_fallback:
            await self._parts.chooser.until_another()
            await child.stop()

    async def _measure(self, child: EngineChild, place: EngineMemoryCase) -> Speeds:
        """Measure the engine's speed. The result is stored for this engine, hardware and base model; a failure is
        stored too, so that the next start skips the measurement.
        """
        parts = self._parts
        on = f" on {parts.device}" if parts.device else ""
        self._is_measuring = True
        log.info("Measuring how fast the engine%s is on this model, for about %.0f s.", on, parts.bench_seconds)
        try:
            rows = await child.measure(widths=widths_up_to(child.width), budget_s=parts.bench_seconds)
        except BackendError as error:
            if error.code not in (OUT_OF_MEMORY, STOPPED):
                log.warning("The engine failed when it was measured; the next start skips the measurement.")
                failed = Speeds.now((), _for_the_hub(error.brief))
                await asyncio.to_thread(parts.speeds.remember, place, parts.settings, failed)
            raise
        finally:
            self._is_measuring = False
        speeds = Speeds.now(rows)
        log.info("%s", speeds)
        await asyncio.to_thread(parts.speeds.remember, place, parts.settings, speeds)
        return speeds

    def _ready(self, child: EngineChild, speeds: Speeds | None, *, is_gguf: bool) -> EngineReady:
        """Return the EngineReady event. The width in it is the measured best one, unless the settings name a width.
        `is_gguf`: the base model is the hub's GGUF file.
        """
        width, rate = child.width, 0.0
        if speeds is not None and self._parts.settings.width == 0:
            width = min(width, speeds.width or width)
        if speeds is not None:
            rate = speeds.rate(width)
        precision = precision_of_file(child.precision, self._files.base_content) if is_gguf else child.precision
        return EngineReady(
            width=width, tokens_per_s=rate, precision=precision, scores=child.scores, device=self._parts.device
        )

    def _place(self) -> EngineMemoryCase:
        chooser = self._parts.chooser
        return place_of(chooser.choice, chooser.hardware, self._files.base_content)

    def _known_limit(self, place: EngineMemoryCase) -> int:
        """Return the maximum number of rollouts at the same time that fit in memory; 0 = unknown."""
        return self._parts.widths.limit(place, self._parts.limits.memory_bytes)

    def _remember_limit(self, place: EngineMemoryCase, width: int) -> None:
        log.warning("Memory ran out: from now on at most %d rollouts are sampled at once.", width)
        self._parts.widths.remember(place, self._parts.limits.memory_bytes, width)

    async def limit_duty(self, share: float) -> None:
        if self._child is not None:
            with suppress(ChildExited):
                await self._child.limit_duty(share)

    async def add_policy(self, version: int, directory: Path | None) -> None:
        if self._child is not None:
            with suppress(ChildExited):
                await self._child.add_policy(version, directory)

    async def drop_policy(self, version: int) -> None:
        if self._child is not None:
            with suppress(ChildExited):
                await self._child.drop_policy(version)

    async def submit(self, request: GroupRequest) -> None:
        if self._child is not None:
            with suppress(ChildExited):
                await self._child.submit(request)

    async def score(self, request: ScoreRequest) -> None:
        if self._child is not None:
            with suppress(ChildExited):
                await self._child.score(request)

    async def cancel(self, lease_id: int) -> None:
        if self._child is not None:
            with suppress(ChildExited):
                await self._child.cancel(lease_id)
