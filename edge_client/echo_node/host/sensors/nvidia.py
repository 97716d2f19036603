"""What NVIDIA's driver tells of the GPU: how busy others keep it, how warm it is, what it draws."""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any, Final

from echo_node.host.sensors.gpu_reading import GpuReading

log = logging.getLogger(__name__)

_MICROSECONDS: Final = 1_000_000


class NvidiaSensors:
    """Opened at the first reading; where there is no driver, there are no readings."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._devices: list[Any] = []
        self._seen: dict[int, int] = {}
        """The newest sample of each device, in microseconds since the epoch."""
        self._is_open = False

    def read(self, own: Collection[int]) -> list[GpuReading]:
        """One reading for each GPU. `own`: processes of this node."""
        if not self._is_open:
            self._open()
        return [self._read(number, device, own) for number, device in enumerate(self._devices)]

    def close(self) -> None:
        if self._devices:
            self._devices = []
            self._nvml.nvmlShutdown()

    def _open(self) -> None:
        import pynvml

        self._is_open, self._nvml = True, pynvml
        try:
            pynvml.nvmlInit()
            self._devices = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
        except pynvml.NVMLError as error:
            log.debug("No GPU of NVIDIA's tells anything: %s", error)

    def _read(self, number: int, device: Any, own: Collection[int]) -> GpuReading:
        celsius = self._ask(self._nvml.nvmlDeviceGetTemperature, device, self._nvml.NVML_TEMPERATURE_GPU)
        milliwatts = self._ask(self._nvml.nvmlDeviceGetPowerUsage, device)
        samples = self._ask(self._nvml.nvmlDeviceGetProcessUtilization, device, self._seen.get(number, 0))
        if samples:
            self._seen[number] = max(sample.timeStamp for sample in samples)
        return GpuReading(
            others=share_of_others([(one.pid, one.smUtil, one.timeStamp) for one in samples or ()], own),
            celsius=None if celsius is None else float(celsius),
            watts=None if milliwatts is None else milliwatts / 1000,
        )

    def _ask(self, question: Any, *arguments: Any) -> Any:
        """None where this GPU or its driver has no answer; that no process ran since is said as an error, too."""
        try:
            return question(*arguments)
        except self._nvml.NVMLError_NotFound:
            return ()
        except self._nvml.NVMLError:
            return None


def share_of_others(samples: Collection[tuple[int, int, int]], own: Collection[int]) -> float:
    """Of (process, percent, microseconds): what other processes took, in the newest second of them."""
    newest = max((at for _, _, at in samples), default=0)
    percents: dict[int, int] = {}
    for pid, percent, at in samples:
        if pid not in own and newest - at <= _MICROSECONDS:
            percents[pid] = max(percents.get(pid, 0), percent)
    return min(1.0, sum(percents.values()) / 100)
