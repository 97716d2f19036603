"""Settings, limits and choice of the engines that fit this machine."""

from __future__ import annotations

from typing import Final

from echo_node.backends import registry
from echo_node.backends.base import EngineSettings
from echo_node.backends.registry import BackendChoice
from echo_node.config import NodeConfig
from echo_node.engine.speeds import SpeedBook, Speeds
from echo_node.engine.widths import EngineMemoryCase
from echo_node.host.devices import Device
from echo_node.host.hardware import Hardware, sensible_threads
from echo_shared.process.supervised import ChildLimits

MEMORY_SHARE: Final = 0.8
"""Fraction of the machine's memory that the engine may use, unless the settings name a limit."""


def settings_of(config: NodeConfig, *, engines: int = 1) -> EngineSettings:
    """Return the engine's settings; CPU threads are divided among the node's `engines`."""
    threads = config.threads or threads_of(config.manners.cpu_share)
    if engines > 1:
        threads = max(1, (threads or sensible_threads()) // engines)
    return EngineSettings(
        width=config.width,
        threads=threads,
        precision=config.precision,
        kv_cache_bytes=config.kv_cache_bytes,
        kept_keys_share=config.kept_keys_share,
        helpers=config.helpers,
        stream_s=config.stream_s,
    )


def threads_of(cpu_share: float) -> int:
    """Return the number of CPU threads for this share of the machine's cores, at least 1. 0 = the engine uses all
    cores.
    """
    return 0 if cpu_share == 1 else max(1, int(cpu_share * sensible_threads()))


def limits_of(config: NodeConfig, hardware: Hardware, *, engines: int = 1) -> ChildLimits:
    """Return the limits of one engine. If the settings name no memory limit, the node's `engines` divide the fraction
    MEMORY_SHARE of the machine's memory among themselves.
    """
    memory_bytes = config.memory_limit_bytes or int(MEMORY_SHARE * hardware.memory_bytes / engines)
    return ChildLimits(memory_bytes=memory_bytes)


def place_of(choice: BackendChoice, hardware: Hardware, base_content: str) -> EngineMemoryCase:
    """Return the key under which an engine's speeds and width limits are stored. May block for some tenths of a
    second.
    """
    return EngineMemoryCase(
        backend=choice.name,
        device=choice.label,
        software=registry.software(choice.name),
        machine=hardware.summary,
        base=base_content,
    )


def measured(
    book: SpeedBook,
    hardware: Hardware,
    base_content: str | None,
    settings: EngineSettings,
    *,
    on: Device | None = None,
) -> dict[tuple[str, str], Speeds]:
    """Return the measured speeds of each usable engine on this base model, by backend and device, or of each engine on
    the device `on`. Blocks the calling thread.
    """
    if base_content is None:
        return {}
    usable = [possible.choice for possible in registry.survey(hardware, on) if possible.missing is None]
    found = [(choice, book.find(place_of(choice, hardware, base_content), settings)) for choice in usable]
    return {(choice.name, choice.device): speeds for choice, speeds in found if speeds is not None}


def chosen(
    book: SpeedBook,
    hardware: Hardware,
    base_content: str | None,
    settings: EngineSettings,
    wanted: str,
    *,
    on: Device | None = None,
) -> BackendChoice:
    """Return the best engine for this machine, or for the device `on`, by measurements on the base model if there are
    any. Blocks the calling thread.

    Raises BackendError if no engine is usable.
    """
    known = measured(book, hardware, base_content, settings, on=on)
    rates = {key: speeds.best for key, speeds in known.items()}
    failures = {key: speeds.failure for key, speeds in known.items() if speeds.failure}
    return registry.choose(hardware, wanted, rates, failures, on=on)
