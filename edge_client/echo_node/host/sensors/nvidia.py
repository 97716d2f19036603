"""GPU readings of NVIDIA's driver: load by other programs, temperature, power.

NVIDIA's driver reports the machine's process ids. A container has different process ids and cannot translate them, so
other programs' load stays unknown there.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, Final

from echo_node.host.sensors.gpu_reading import GpuReading
from echo_node.host.sensors.kin import HUB, Kin, sees_the_machines_pids

log = logging.getLogger(__name__)

_MICROSECONDS: Final = 1_000_000


class NvidiaSensors:
    """Sensors of NVIDIA's driver, which is opened at the first reading. Without the driver there are no readings."""

    def __init__(self, kin: Kin | None = None) -> None:
        self._kin = kin or Kin()
        self._nvml: Any = None
        self._devices: list[Any] = []
        self._seen: dict[int, int] = {}
        """Time of the newest sample of each device, in microseconds since the epoch."""
        self._is_open = False

    def read(self, own: Collection[int]) -> list[GpuReading]:
        """Return one reading for each GPU. `own`: processes of this node."""
        if not self._is_open:
            self._open()
        knows = bool(self._devices) and (sees_the_machines_pids() or self._lists(own))
        return [self._read(number, device, own, knows=knows) for number, device in enumerate(self._devices)]

    def close(self) -> None:
        if self._devices:
            self._devices = []
            self._ask(self._nvml.nvmlShutdown)

    def _open(self) -> None:
        self._is_open = True
        try:
            import pynvml
        except (ImportError, OSError) as error:
            log.debug("NVIDIA's driver is not asked: %s", error)
            return
        self._nvml = pynvml
        try:
            pynvml.nvmlInit()
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            log.debug("No GPU of NVIDIA's tells anything: %s", error)

    def _lists(self, own: Collection[int]) -> bool:
        """Return True if the driver lists a process of this node under the id that the process has here."""
        listed = [self._ask(self._nvml.nvmlDeviceGetComputeRunningProcesses, device) for device in self._devices]
        return any(process.pid in own for processes in listed for process in processes or ())

    def _read(self, number: int, device: Any, own: Collection[int], *, knows: bool) -> GpuReading:
        celsius = self._ask(self._nvml.nvmlDeviceGetTemperature, device, self._nvml.NVML_TEMPERATURE_GPU)
        milliwatts = self._ask(self._nvml.nvmlDeviceGetPowerUsage, device)
        samples = self._ask(self._nvml.nvmlDeviceGetProcessUtilization, device, self._seen.get(number, 0))
        if samples:
            self._seen[number] = max(sample.timeStamp for sample in samples)
        others = hub = None
        if knows and samples is not None:
            used = [(one.pid, one.smUtil, one.timeStamp) for one in samples]
            packages = {one.pid: self._kin.package_of(one.pid) for one in samples}
            others = share_of({pid for pid, package in packages.items() if not package}.difference(own), used)
            hub = share_of({pid for pid, package in packages.items() if package == HUB}, used)
        return GpuReading(
            others=others,
            hub=hub,
            celsius=None if celsius is None else float(celsius),
            watts=None if milliwatts is None else milliwatts / 1000,
            uuid=self._uuid_of(device),
        )

    def _uuid_of(self, device: Any) -> str:
        uuid = self._ask(self._nvml.nvmlDeviceGetUUID, device) or ""
        # Older releases of NVIDIA's Python library return bytes.
        return uuid.decode() if isinstance(uuid, bytes) else uuid

    def _ask(self, question: Any, *arguments: Any) -> Any:
        """Return the driver's answer; None if there is none. If the driver answers NotFound, no process ran: return
        ().
        """
        try:
            return question(*arguments)
        except self._nvml.NVMLError_NotFound:
            return ()
        except self._nvml.NVMLError:
            return None


def share_of(pids: Collection[int], samples: Collection[tuple[int, int, int]]) -> float:
    """Return the share of the processes in the newest second of the samples (process id, percent, microseconds)."""
    newest = max((at for _, _, at in samples), default=0)
    percents: dict[int, int] = {}
    for pid, percent, at in samples:
        if pid in pids and newest - at <= _MICROSECONDS:
            percents[pid] = max(percents.get(pid, 0), percent)
    return min(1.0, sum(percents.values()) / 100)
