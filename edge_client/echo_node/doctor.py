"""`echo-node doctor`: shows the machine's parts, the obstacles to joining a hub, and the commands that remove them.

Engines are tried only as far as this takes little time: child processes import their libraries and end at once, so a
crash or a hang is reported like any other problem.
"""

from __future__ import annotations

import asyncio
import errno
import http.client
import json
import os
import platform
import shutil
import ssl
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from echo_node.backends import registry
from echo_node.backends.caging import CAGED_ENVIRONMENT
from echo_node.backends.gpu_cage import STARTS, GpuCages
from echo_node.backends.registry import BackendChoice, Possibility
from echo_node.config import NodeConfig, load_config
from echo_node.doctor_links import examine_links
from echo_node.doctor_manners import examine_manners
from echo_node.doctor_router import examine_router
from echo_node.engine.fitting import chosen, place_of, settings_of
from echo_node.engine.on_devices import CommonBackend, named_devices, seen_by
from echo_node.engine.speeds import SpeedBook
from echo_node.findings import Finding, Level
from echo_node.host import control, devices, hardware
from echo_node.host.address import HubAddress
from echo_node.host.artefact_files import content_here, headroom_bytes
from echo_node.host.base_forms import largest_base_bytes
from echo_node.host.hardware import Hardware
from echo_node.host.hubs import HubRecord, Hubs
from echo_node.host.paths import NodePaths
from echo_node.host.probing import PROBE_S, failure_of
from echo_node.net.tls import handshake_failure
from echo_shared.cage.description import CageMode, Held
from echo_shared.cage.leeway import Leeway
from echo_shared.errors import BackendError, ConfigError, EchoError, LocalProtocolError, StorageError
from echo_shared.wire.codec import check_codec
from echo_shared.wire.messages.fields import printable_line

HUB_S: Final = 10.0
LITTLE_DISK_BYTES: Final = 4 * 2**30
LITTLE_MEMORY_BYTES: Final = 2 * 2**30
LIBTORRENT_MACOS: Final = 14
"""Oldest macOS with a build of libtorrent for Apple silicon."""
_GIB: Final = 2**30
_MOST_SAID: Final = 200
UNCAGED_WORKS: Final = "; it works without its cage"
_SUPPORTS_RPC: Final = """
import llama_cpp
from echo_shared.gguf.llama_cpp_devices import load_devices
load_devices()
raise SystemExit(not llama_cpp.llama_supports_rpc())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    findings: tuple[Finding, ...]

    @property
    def can_join(self) -> bool:
        return all(finding.level != "problem" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        return {"can_join": self.can_join, "findings": [asdict(finding) for finding in self.findings]}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Patient:
    """Files and settings of the node to examine."""

    paths: NodePaths
    config: NodeConfig
    hardware: Hardware
    hub: HubRecord | None
    """The hub that was joined last, or None."""
    url: str | None
    """Address of a hub to examine; None = examine the last joined one."""


def examine(paths: NodePaths, url: str | None) -> Diagnosis:
    """Examine a node with these files, for the hub at `url` or the last joined hub.

    Blocks the calling thread for seconds: it imports engines and asks the hub.
    """
    findings: list[Finding] = []
    config, hub = NodeConfig.model_construct(), None
    try:
        hub = Hubs(paths).last()
        file = paths.config_file if paths.config_file.exists() else None
        config = load_config(file, {} if hub is None else hub.flags)
    except (ConfigError, StorageError) as error:
        findings.append(Finding(subject="settings", level="problem", what=_said(error), do=error.do or ""))
    patient = _Patient(paths=paths, config=config, hardware=hardware.detect(), hub=hub, url=url)
    findings += [*_machine(patient.hardware), *_engines(patient), _cage(config.cage), *_messages(), _swarm()]
    findings.append(examine_router(config))
    findings.append(examine_links(paths, config))
    findings += _data_directory(patient)
    on_gpu = bool(patient.hardware.cuda_gpus) or patient.hardware.apple_silicon
    findings += [*examine_manners(paths, config, on_gpu=on_gpu), *_hub(patient)]
    return Diagnosis(findings=tuple(findings))


def _machine(hardware: Hardware) -> Iterator[Finding]:
    system = f"{platform.system()} {platform.release()} on {platform.machine()}"
    yield Finding(subject="system", level="ok", what=f"{system}, Python {platform.python_version()}")
    cores = f"{hardware.cpu_name}, {hardware.physical_cores} cores, {hardware.usable_cores} of their threads usable"
    yield Finding(subject="processor", level="ok", what=cores + (", Apple Silicon" if hardware.apple_silicon else ""))
    memory = f"{hardware.memory_bytes / _GIB:.1f} GiB"
    if 0 < hardware.memory_bytes < LITTLE_MEMORY_BYTES:
        yield Finding(subject="memory", level="warning", what=memory, do="Only the smallest models fit.")
    elif hardware.memory_bytes:
        yield Finding(subject="memory", level="ok", what=memory)
    else:
        yield Finding(subject="memory", level="note", what="the system does not report its memory")
    for gpu in hardware.cuda_gpus:
        what = f"{gpu.name}, {gpu.memory_bytes / _GIB:.0f} GiB" if gpu.memory_bytes else gpu.name
        yield Finding(subject="GPU", level="ok", what=what)
    if not hardware.cuda_gpus and not hardware.apple_silicon:
        what = "no NVIDIA driver answers: the processor samples"
        if hardware.silent_gpu:
            what = "an NVIDIA GPU is present, but its driver does not answer: the processor samples"
        yield Finding(subject="GPU", level="note", what=what)


def _engines(patient: _Patient) -> Iterator[Finding]:
    wanted = patient.config.wanted_backend
    survey = [one for one in registry.survey(patient.hardware) if not one.on_request or one.choice.name == wanted]
    cages = GpuCages(patient.paths.gpu_cages, probe=_probe_gpu)
    tried = {
        (one.choice.name, one.choice.device): _try(one.choice, patient.config.cage, cages)
        for one in survey
        if one.missing is None
    }
    working = [key for key, (failure, _) in tried.items() if failure is None]
    better = True
    for one in survey:
        key = (one.choice.name, one.choice.device)
        better = better and key not in working
        if one.missing is not None:
            yield _missing(one, one.missing, level="warning" if better else "note")
        else:
            yield _engine(one.choice, *tried[key], config_file=patient.paths.config_file)
    if any(name == "llama_cpp" for name, _ in working):
        yield _rpc()
    yield from _choice(patient, working)


def _missing(one: Possibility, missing: BackendError, *, level: Level) -> Finding:
    subject = f"{one.choice.name} on {one.choice.device}"
    if missing.code == registry.NO_DEVICE:
        return Finding(subject=subject, level="note", what="not for this machine")
    return Finding(subject=subject, level=level, what=_said(missing), do=missing.do or "")


def _engine(choice: BackendChoice, failure: str | None, leeway: Leeway, *, config_file: Path) -> Finding:
    """Return the finding about an engine that was tried. `failure`: its error, None = the engine works; `leeway`: the
    narrowest cage (sandbox) in which its GPU works.
    """
    subject = f"{choice.name} on {choice.device}"
    if failure is not None:
        do = registry.reinstall(choice.name)
        if choice.device == "cuda":
            do = "Update the NVIDIA driver, or install a PyTorch for it: https://pytorch.org/get-started/locally/"
        if failure.endswith(UNCAGED_WORKS):
            do = f'Report it. Until then, if you trust your hubs: cage = "off" in {config_file}'
        return Finding(subject=subject, level="warning", what=f"does not work: {failure}", do=do)
    usable = f"usable: {registry.software(choice.name)}"
    if not leeway.lacks:
        return Finding(subject=subject, level="ok", what=usable)
    what = f"{usable}, in a wider cage (not {', '.join(leeway.lacks)}): {leeway.why}"
    do = "Join only hubs that you trust, and report what this says: echo-node doctor --cage"
    return Finding(subject=subject, level="warning", what=what, do=do)


def _try(choice: BackendChoice, cage: CageMode, cages: GpuCages) -> tuple[str | None, Leeway]:
    """Load the engine's library for this device. Return the error or None, and the cage (sandbox) used."""
    fit = cages.find(choice, cage)
    if fit.failure:
        return fit.failure, fit.leeway
    if cage == "required" and fit.leeway.lacks:
        return f"its cage would be incomplete: {fit.leeway.why}", fit.leeway
    imports = "; ".join(f"import {package}" for package in registry.packages(choice.name))
    if choice.device == "cuda":
        imports += "; import torch; torch.zeros(1, device='cuda')"
    with tempfile.TemporaryDirectory(prefix="echo-doctor-", ignore_cleanup_errors=True) as directory:
        arguments = f"{choice.name!r}, {choice.device!r}, {directory!r}, {cage!r}, {fit.leeway.name!r}"
        failure = failure_of(f"from echo_node.backends.caging import cage_trial; cage_trial({arguments}); {imports}")
    if failure is not None and cage == "auto" and failure_of(imports) is None:
        return failure + UNCAGED_WORKS, fit.leeway
    return failure, fit.leeway


def _probe_gpu(code: str) -> str | None:
    return failure_of(code, env=CAGED_ENVIRONMENT)


def _cage(mode: CageMode) -> Finding:
    """Report the protections of the engine's cage, tested by a process that tries to break out of it."""
    subject = "engine's cage"
    if mode == "off":
        do = 'Set cage to "auto": the engine then reads what hubs send without your rights.'
        return Finding(subject=subject, level="warning", what="none: the settings turn it off", do=do)
    with tempfile.TemporaryDirectory(prefix="echo-doctor-") as directory:
        private = Path(directory) / "private"
        private.write_bytes(b"private")
        try:
            held = _tried(private)
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            return Finding(subject=subject, level="warning", what=f"it cannot be tested: {error}"[:_MOST_SAID])
    if not held.lacks:
        return Finding(subject=subject, level="ok", what=held.sentence)
    if mode == "required":
        do = 'Set cage to "auto" to accept an incomplete cage.'
        return Finding(subject=subject, level="problem", what=held.sentence, do=do)
    return Finding(subject=subject, level="warning", what=held.sentence, do="Join only hubs that you trust.")


def _tried(private: Path) -> Held:
    """Run the test process. Raises OSError, ValueError, KeyError or SubprocessError if the test itself fails."""
    command = [sys.executable, "-m", "echo_shared.cage.trial", str(private)]
    said = subprocess.run(
        command, capture_output=True, text=True, timeout=PROBE_S, check=True, stdin=subprocess.DEVNULL
    )
    return Held.of(json.loads(said.stdout))


def _rpc() -> Finding:
    subject = "several devices as one"
    if failure_of(_SUPPORTS_RPC) is None:
        return Finding(subject=subject, level="ok", what="llama.cpp is built for it")
    what = "llama.cpp is not built for it (needed for `lend` and `--with` only)"
    return Finding(subject=subject, level="note", what=what, do=registry.reinstall_llama_with_rpc())


def _choice(patient: _Patient, working: list[tuple[str, str]]) -> Iterator[Finding]:
    if not working:
        do = _first_remedy(patient.hardware)
        yield Finding(subject="engine", level="problem", what="No sampling engine works here.", do=do)
        return
    base = None if patient.hub is None else content_here(patient.paths.base(patient.hub.run_id))
    book, settings = SpeedBook(patient.paths.speeds), settings_of(patient.config)
    if patient.config.devices:
        yield from _devices(patient)
        return
    try:
        choice = chosen(book, patient.hardware, base, settings, patient.config.wanted_backend)
    except BackendError as error:
        yield Finding(subject="engine", level="problem", what=_said(error), do=error.do or "")
        return
    named = f"{choice.name} on {choice.device} ({choice.reason})"
    if choice.unused_gpu:
        yield Finding(subject="unused GPU", level="warning", what=choice.unused_gpu)
    if (choice.name, choice.device) in working:
        yield Finding(subject="engine", level="ok", what=named)
    else:
        others = " or ".join(f"--backend {name}" for name in sorted({name for name, _ in working}))
        do = f"Follow the advice above, or use another: echo-node join URL {others}"
        yield Finding(subject="engine", level="problem", what=f"{named} is the choice, but it does not work", do=do)
    speeds = None if base is None else book.find(place_of(choice, patient.hardware, base), settings)
    if speeds is not None and speeds.decode:
        yield Finding(subject="speed", level="ok", what=str(speeds))
    else:
        yield Finding(subject="speed", level="note", what="not measured on the hub's model", do="echo-node bench")


def _devices(patient: _Patient) -> Iterator[Finding]:
    """Yield the device and the engine of each device that the settings name."""
    found, wanted = patient.hardware, patient.config.wanted_backend
    try:
        names, backend = named_devices(patient.config.devices, found), CommonBackend()
    except BackendError as error:
        yield Finding(subject="devices", level="problem", what=_said(error), do=error.do or "")
        return
    base = None if patient.hub is None else content_here(patient.paths.base(patient.hub.run_id))
    book, settings = SpeedBook(patient.paths.speeds), settings_of(patient.config, engines=len(names))
    for name in names:
        try:
            device = devices.find(name, found, os.environ)
            kind = backend.find(book, found, base, settings, wanted, names)
            choice = chosen(book, seen_by(device, found), base, settings, kind, on=device)
        except BackendError as error:
            yield Finding(subject=name, level="problem", what=_said(error), do=error.do or "")
            continue
        speeds = None if base is None else book.find(place_of(choice, seen_by(device, found), base), settings)
        title = f"{device.title}, " if device.title else ""
        speed = f". {speeds}" if speeds is not None and speeds.decode else ", not measured on the hub's model"
        yield Finding(subject=name, level="ok", what=f"{title}{choice.name}{speed}")


def _first_remedy(hardware: Hardware) -> str:
    """Return the command that installs the best engine that can be installed here."""
    missing = [one.missing for one in registry.survey(hardware) if one.missing is not None]
    return next((error.do for error in missing if error.do and error.code != registry.NO_DEVICE), "")


def _said(error: EchoError) -> str:
    return f"{error.what} ({error.got})" if error.got else error.what


def cage_lines() -> Iterator[str]:
    """Yield, for each engine on a GPU, the narrowest cage (sandbox) in which it works, and the calls that narrower
    cages refuse.
    """
    if sys.platform != "linux":
        yield "Only Linux has a cage with steps."
        return
    # Imported here, because it can be imported only on Linux.
    from echo_node.backends.cage_report import report

    usable = [one.choice for one in registry.survey(hardware.detect()) if one.missing is None]
    on_gpu = [choice for choice in usable if choice.device != "cpu" and choice.name in STARTS]
    if not on_gpu:
        yield "No engine with a cage uses a GPU here: echo-node doctor says what is missing."
    for choice in on_gpu:
        yield from report(choice)


def _messages() -> Iterator[Finding]:
    """Yield a problem if this installation cannot decode a hub's messages."""
    try:
        check_codec()
    except LocalProtocolError as error:
        yield Finding(subject="messages", level="problem", what=_said(error), do=error.do or "")


def _swarm() -> Finding:
    failure = failure_of("from echo_shared.swarm.trial import main; main()")
    if failure is None:
        return Finding(subject="swarm", level="ok", what="libtorrent works: one client has fetched from another")
    what = f"libtorrent does not work ({failure}): the hub itself serves all files that it does not push"
    if sys.platform == "darwin" and not _has_libtorrent(platform.machine(), platform.mac_ver()[0]):
        do = "No build of libtorrent exists for this Mac. The node works without it, but serves no other nodes."
        return Finding(subject="swarm", level="warning", what=what, do=do)
    do = f"{sys.executable} -m pip install --upgrade libtorrent"
    return Finding(subject="swarm", level="warning", what=what, do=do)


def _has_libtorrent(machine: str, macos: str) -> bool:
    return machine == "arm64" and int(macos.partition(".")[0] or 0) >= LIBTORRENT_MACOS


def _data_directory(patient: _Patient) -> Iterator[Finding]:
    paths, least = patient.paths, patient.config.manners.min_free_disk_bytes
    directory = paths.data_dir
    there = next(path for path in (directory, *directory.parents) if path.exists())
    other = "or choose another directory: --data-dir DIR"
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"x")
            file.flush()
        disk = shutil.disk_usage(there)
    except OSError as error:
        what = f"{directory} cannot be written: {error.strerror or error}"
        do = "Free some space on the disk of" if error.errno == errno.ENOSPC else "Make it writable:"
        yield Finding(subject="data directory", level="problem", what=what, do=f"{do} {there}, {other}")
        return
    running = ", and a node uses it now" if asyncio.run(control.is_running(paths.control_file)) else ""
    yield Finding(subject="data directory", level="ok", what=f"{directory} can be written{running}")
    config = patient.config
    room_bytes = max(0, disk.free - headroom_bytes(disk.total))
    largest = largest_base_bytes(room_bytes, backend=config.wanted_backend, precision=config.precision)
    what = f"{disk.free / _GIB:.1f} of {disk.total / _GIB:.1f} GiB free, room for a base model of {largest / _GIB:.1f}"
    if disk.free <= headroom_bytes(disk.total):
        yield Finding(subject="disk", level="problem", what=what, do=f"Free some space on the disk of {there}, {other}")
    elif disk.free < least:
        do = f"Free some space on the disk of {there}, or set less: min_free_disk_bytes of [manners]."
        what = f"{what}: a node pauses below {least / _GIB:.2f}"
        yield Finding(subject="disk", level="warning", what=what, do=do)
    elif disk.free < LITTLE_DISK_BYTES:
        yield Finding(subject="disk", level="warning", what=what, do="Larger models will not fit.")
    else:
        yield Finding(subject="disk", level="ok", what=what)


def _hub(patient: _Patient) -> Iterator[Finding]:
    joined = patient.hub
    if joined is not None:
        yield Finding(subject="joined", level="ok", what=f"{joined.run_name or 'a hub'} at {joined.url}")
    if patient.url is None and joined is None:
        what = "no hub joined yet"
        yield Finding(subject="hub", level="note", what=what, do="echo-node doctor URL, then echo-node join URL")
        return
    # A stored address is not checked again: `join` has accepted it.
    insecure = patient.config.insecure or patient.url is None
    try:
        address = HubAddress.parse(patient.url or (joined.url if joined else ""), insecure=insecure)
    except ConfigError as error:
        yield Finding(subject="hub", level="problem", what=f"{error.what} ({error.got})", do=error.do or "")
        return
    yield _answer(address)


def _answer(address: HubAddress) -> Finding:
    try:
        with _open(address) as answer:
            status, body = answer.status, answer.read(65_536)
    except urllib.error.HTTPError as error:
        with error:
            status, body = error.code, error.read(65_536)
    except (OSError, http.client.HTTPException) as error:
        reason = error.reason if isinstance(error, urllib.error.URLError) else error
        if isinstance(reason, ssl.SSLError):
            failure = handshake_failure(reason, address)
            return Finding(subject="hub", level="problem", what=_said(failure), do=failure.do or "")
        do = "Check the address and this machine's connection. Ask the operator if the hub runs."
        what = f"{address.origin} cannot be reached: {printable_line(str(reason) or type(reason).__name__)}"
        return Finding(subject="hub", level="problem", what=what, do=do)
    health = _health(body) if status in (200, 503) else None
    if health is None:
        what = f"{address.origin} answers with status {status}, but not like a hub"
        return Finding(subject="hub", level="problem", what=what, do="Check the address; ask the operator for it.")
    if health == "failing":
        what = f"{address.origin} answers, but reports a failure"
        return Finding(subject="hub", level="warning", what=what, do="Tell its operator. This node can still join.")
    what = f"{address.origin} answers{'; it is still starting' if health == 'starting' else ''}"
    return Finding(subject="hub", level="ok", what=what)


def _open(address: HubAddress) -> http.client.HTTPResponse:
    proxies: dict[str, str] | None = {} if address.is_loopback else None  # None: use the environment's proxies.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxies))
    answer: http.client.HTTPResponse = opener.open(address.url("/readyz"), timeout=HUB_S)
    return answer


def _health(body: bytes) -> str | None:
    """Return starting, ready or failing; None if the answer is not a hub's."""
    try:
        said = json.loads(body)["status"]
        return said if said in ("starting", "ready", "failing") else None
    except (ValueError, TypeError, KeyError, RecursionError):
        return None


def lines_of(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield text lines: finding and remedy on separate, unbroken lines, so that commands can be copied."""
    indent = max(len(finding.subject) for finding in diagnosis.findings) + 2
    for finding in diagnosis.findings:
        mark = "PROBLEM" if finding.level == "problem" else finding.level
        yield f"{mark:<9}{finding.subject:<{indent}}{finding.what}"
        if finding.do:
            yield f"{'':<{9 + indent}}do: {finding.do}"
