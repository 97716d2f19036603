"""`echo-node bench`: measures each engine that this machine can run, and shows which one the node chooses."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from echo_node.backends import registry
from echo_node.backends.base import OUT_OF_MEMORY, EngineSettings
from echo_node.backends.gpu_cage import GpuCages
from echo_node.backends.measure import widths_up_to
from echo_node.backends.process import EngineChild
from echo_node.backends.random_model import make_random_model
from echo_node.backends.registry import BackendChoice
from echo_node.config import NodeConfig
from echo_node.engine.fitting import chosen as chosen_by
from echo_node.engine.fitting import limits_of, place_of, settings_of
from echo_node.engine.on_devices import CommonBackend, named_devices, seen_by
from echo_node.engine.speeds import SpeedBook, Speeds
from echo_node.engine.widths import EngineMemoryCase, Widths
from echo_node.host import devices
from echo_node.host.artefact_files import content_here
from echo_node.host.base_forms import drop_replaced
from echo_node.host.devices import Device
from echo_node.host.hardware import Hardware
from echo_node.host.hubs import HubRecord
from echo_node.host.paths import NodePaths
from echo_shared.delta.base_weights import NO_WEIGHTS
from echo_shared.errors import BackendError, ConfigError, StorageError

log = logging.getLogger(__name__)

CPU_WIDTH: Final = 64
GPU_WIDTH: Final = 256
"""Largest width (rollouts at the same time) to measure, unless the settings name a width."""
BUSY_SHARE: Final = 0.5
"""If programs wanted at least this fraction of the machine's cores in the last minute, the machine counts as busy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Base:
    """The model on which engines are measured."""

    title: str
    directory: Path
    derived: Path
    content: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOutcome:
    """Result of measuring one engine on one device: its speeds, or the reason why there are none."""

    choice: BackendChoice
    precision: str
    speeds: Speeds | None = None
    problem: str = ""

    @property
    def works(self) -> bool:
        """True if the engine drew all requested tokens, even if too slowly for a measurement."""
        return self.speeds is not None and not self.speeds.failure


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """All results, and the choice of a node on this machine."""

    base: str
    machine: str
    outcomes: tuple[BenchOutcome, ...]
    chosen: BackendChoice | None
    width: int
    """Maximum number of rollouts sampled at the same time; 0 = the engine chooses."""
    seconds: float
    """Time budget for each engine."""
    busy_cores: float
    """Load average of the last minute before the measurement, in cores."""
    devices: tuple[str, ...] = ()
    """Devices named by the settings. `chosen` then describes the first device; `width` sums all devices."""

    def as_json(self) -> dict[str, Any]:
        engines = [
            {
                "backend": outcome.choice.name,
                "device": outcome.choice.label,
                "precision": outcome.precision,
                "prefill_tokens_per_s": outcome.speeds.prefill if outcome.speeds else 0.0,
                "decode_tokens_per_s": outcome.speeds.decode if outcome.speeds else {},
                "width": outcome.speeds.width if outcome.speeds else 0,
                "problem": outcome.problem,
            }
            for outcome in self.outcomes
        ]
        chosen = None
        if self.chosen is not None:
            one = self.chosen
            device = ", ".join(self.devices) or one.device
            chosen = {"backend": one.name, "device": device, "why": one.reason, "unused_gpu": one.unused_gpu}
        return {
            "base": self.base,
            "machine": self.machine,
            "engines": engines,
            "chosen": chosen,
            "width": self.width,
            "busy_cores": self.busy_cores,
        }


@contextmanager
def base_for(paths: NodePaths, hub: HubRecord | None, model: Path | None) -> Iterator[Base]:
    """Yield the model to measure on: `model`, else the stored base model of `hub`, else a temporary random model.

    Raises ConfigError if `model` holds no model.
    """
    content = None if hub is None else content_here(paths.base(hub.run_id))
    if model is None and hub is not None and content is not None:
        directory = paths.base(hub.run_id)
        drop_replaced(directory)
        derived = paths.derived / directory.name / content
        title = f"the base model of {hub.run_name or hub.url}"
        yield Base(title=title, directory=directory, derived=derived, content=content)
        return
    if model is not None and not (model / "config.json").is_file():
        raise ConfigError("This directory holds no model.", got=f"no {model / 'config.json'}", do="--model DIR")
    try:
        paths.data_dir.mkdir(parents=True, exist_ok=True)
        scratch = tempfile.TemporaryDirectory(prefix="bench-", dir=paths.data_dir)
    except OSError as error:
        raise StorageError("The data directory cannot be used.", got=f"{paths.data_dir}: {error.strerror}") from error
    with scratch as name:
        derived = Path(name) / "derived"
        if model is not None:
            yield Base(title=str(model), directory=model, derived=derived, content=_content_of(model))
        else:
            directory = make_random_model(Path(name) / "random")
            yield Base(title="a random model", directory=directory, derived=derived, content="random")


def _content_of(model: Path) -> str:
    stats = [(path.name, path.stat()) for path in sorted(model.iterdir())]
    described = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in stats]
    return hashlib.blake2b(repr(described).encode(), digest_size=16).hexdigest()


class Bench:
    """Measures engines in sequence, in separate processes, and stores the results."""

    def __init__(self, paths: NodePaths, config: NodeConfig, hardware: Hardware, base: Base) -> None:
        self._log = paths.logs / "bench.log"
        self._book = SpeedBook(paths.speeds)
        self._widths = Widths(paths.widths)
        self._cages = GpuCages(paths.gpu_cages)
        self._config = config
        self._hardware = hardware
        self._base = base
        self._seen: dict[str, tuple[Device | None, Hardware]] = {"": (None, hardware)}
        """Devices to measure with their hardware, by name, from `_find_devices`."""

    async def run(self, *, backend: str, seconds: float, begin: Callable[[BackendChoice], None]) -> BenchReport:
        """Measure every usable engine for `seconds`, or only `backend` unless it is "auto". Call `begin` before each.

        Stored limits on widths are deleted first, because more memory may be free now. Raises ConfigError for an
        unknown backend.
        """
        if backend not in ("auto", *registry.NAMES):
            raise ConfigError("There is no such backend.", got=backend, do=f"One of auto, {', '.join(registry.NAMES)}")
        try:
            self._widths.forget()
        except OSError as error:
            log.warning("Stored width limits cannot be deleted: %s", error)
        outcomes, busy_cores = [], psutil.getloadavg()[0]
        self._seen = await asyncio.to_thread(self._find_devices)
        for possible in [found for on, seen in self._seen.values() for found in registry.survey(seen, on)]:
            choice, missing = possible.choice, possible.missing
            if backend != choice.name and (backend != "auto" or possible.on_request):
                continue
            if missing is None:
                begin(choice)
                outcomes.append(await self._measure(choice, seconds))
            elif backend != "auto" or missing.code != registry.NO_DEVICE:
                problem = " ".join(part for part in (missing.what, missing.do) if part)
                outcomes.append(self._outcome(choice, problem=problem))
        return self._report(tuple(outcomes), seconds=seconds, busy_cores=busy_cores)

    def _find_devices(self) -> dict[str, tuple[Device | None, Hardware]]:
        """Return each device that the settings name, with the hardware that its engine sees, by name; one entry without
        a device if they name none. Raises BackendError for a device that is not here.
        """
        names = named_devices(self._config.devices, self._hardware)
        found = {name: devices.find(name, self._hardware, os.environ) for name in names}
        seen: dict[str, tuple[Device | None, Hardware]] = {
            name: (one, seen_by(one, self._hardware)) for name, one in found.items()
        }
        return seen or {"": (None, self._hardware)}

    @property
    def _settings(self) -> EngineSettings:
        return settings_of(self._config, engines=len(self._seen))

    def _place(self, choice: BackendChoice) -> EngineMemoryCase:
        _, seen = self._seen["" if choice.on is None else choice.on.name]
        return place_of(choice, seen, self._base.content)

    async def _measure(self, choice: BackendChoice, seconds: float) -> BenchOutcome:
        try:
            speeds = Speeds.now(await self._rows(choice, seconds))
        except BackendError as error:
            problem = f"{error.what} {error.got or ''}".strip()
            if error.code == NO_WEIGHTS:  # Missing weights are not the engine's fault: store no failure.
                return self._outcome(choice, problem=f"{problem} {error.do}")
            speeds = Speeds.now((), problem)
        else:
            problem = "" if speeds.decode else f"It is too slow to be measured in {seconds:.0f} s."
        self._book.remember(self._place(choice), self._settings, speeds)
        return self._outcome(choice, speeds=speeds, problem=problem)

    async def _rows(self, choice: BackendChoice, seconds: float) -> list[dict[str, Any]]:
        """Measure the engine, and return the measurements. If memory runs out, measure again with half the width
        (rollouts at the same time). Raises BackendError.
        """
        width = self._config.width or (CPU_WIDTH if choice.device == "cpu" else GPU_WIDTH)
        while True:
            try:
                return await self._rows_at(choice, width, seconds)
            except BackendError as error:
                if error.code != OUT_OF_MEMORY or width == 1:
                    raise
                log.warning("%s on %s: too little memory for width %d.", choice.name, choice.label, width)
                width //= 2

    async def _rows_at(self, choice: BackendChoice, width: int, seconds: float) -> list[dict[str, Any]]:
        terms = await asyncio.to_thread(self._cages.terms, choice, self._config.cage)
        engine = await EngineChild.start(
            choice,
            base_dir=self._base.directory,
            derived_dir=self._base.derived,
            log=self._log,
            settings=replace(self._settings, width=width),
            limits=limits_of(self._config, self._hardware, engines=len(self._seen)),
            cage=terms,
        )
        try:
            return await engine.measure(widths=widths_up_to(engine.width), budget_s=seconds)
        finally:
            await engine.stop()

    def _outcome(self, choice: BackendChoice, *, speeds: Speeds | None = None, problem: str = "") -> BenchOutcome:
        return BenchOutcome(
            choice=choice, precision=settings_of(self._config).precision, speeds=speeds, problem=problem
        )

    def _report(self, outcomes: tuple[BenchOutcome, ...], *, seconds: float, busy_cores: float) -> BenchReport:
        chosen, width, names = None, self._config.width, tuple(name for name in self._seen if name)
        if any(outcome.speeds is not None and outcome.speeds.decode for outcome in outcomes):
            choices = self._choices(names)
            widths = [self._width_of(choice) for choice in choices]
            chosen, width = choices[0], sum(widths) if all(widths) else 0
        return BenchReport(
            base=self._base.title,
            machine=self._hardware.summary,
            outcomes=outcomes,
            chosen=chosen,
            width=width,
            seconds=seconds,
            busy_cores=busy_cores,
            devices=names,
        )

    def _choices(self, names: tuple[str, ...]) -> list[BackendChoice]:
        """Return the engine that a node with these settings would choose for each device."""
        book, settings, content = self._book, self._settings, self._base.content
        wanted: str = self._config.wanted_backend
        if names:
            wanted = CommonBackend().find(book, self._hardware, content, settings, wanted, names)
        return [chosen_by(book, seen, content, settings, wanted, on=on) for on, seen in self._seen.values()]

    def _width_of(self, choice: BackendChoice) -> int:
        speeds = self._book.find(self._place(choice), self._settings)
        return self._config.width or (0 if speeds is None else speeds.width)


def table_of(report: BenchReport) -> Table:
    measured = [outcome.speeds for outcome in report.outcomes if outcome.speeds is not None]
    widths = sorted({width for speeds in measured for width in speeds.decode})
    table = Table(
        title=Text(f"Tokens per second on {report.base}"),
        caption="w8: drawn by 8 rollouts at once" if widths else None,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in ("backend", "device", "precision"):
        table.add_column(name)
    for name in ("prompts", *(f"w{width}" for width in widths), "best"):
        table.add_column(name, justify="right")
    if any(outcome.problem for outcome in report.outcomes):
        table.add_column("problem", ratio=1)
    for outcome in report.outcomes:
        rates = {} if outcome.speeds is None else outcome.speeds.decode
        prefill = outcome.speeds.prefill if outcome.speeds is not None else 0.0
        cells = [_number(prefill), *(_number(rates.get(width, 0.0)) for width in widths)]
        best = f"w{outcome.speeds.width}" if rates and outcome.speeds is not None else "-"
        # Use Text: a plain string "[cpu]" would be read as markup.
        problem = [Text(outcome.problem)] if outcome.problem else []
        table.add_row(outcome.choice.name, outcome.choice.label, outcome.precision, *cells, best, *problem)
    return table


def verdict(report: BenchReport) -> str:
    if report.chosen is None and any(outcome.works for outcome in report.outcomes):
        return _too_slow(report)
    if report.chosen is None:
        return "No engine works on this machine. echo-node doctor says more."
    chosen = report.chosen
    width = f"{report.width} rollouts at once" if report.width else "a width that the engine chooses"
    device = " and ".join(report.devices) or chosen.device
    sentence = f"Chosen: {chosen.name} on {device}, {width} ({chosen.reason})."
    return f"{sentence} {chosen.unused_gpu}".rstrip()


def _too_slow(report: BenchReport) -> str:
    cores = psutil.cpu_count() or 1
    more = f"echo-node bench --seconds {min(600, round(4 * report.seconds))}"
    if report.busy_cores >= BUSY_SHARE * cores:
        return (
            f"The machine is busy: programs wanted {report.busy_cores:.1f} of its {cores} cores before this began, and "
            f"no engine got far enough in {report.seconds:.0f} s to be measured. Measure again when it is idle, or for "
            f"longer: {more}"
        )
    return f"Engines work here, but none got far enough in {report.seconds:.0f} s to be measured. For longer: {more}"


def _number(rate: float) -> str:
    return f"{rate:,.0f}" if rate else "-"
