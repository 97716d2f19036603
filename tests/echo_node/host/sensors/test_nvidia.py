"""The GPU load of other programs, from a stub of NVIDIA's library; unknown without the library."""

from __future__ import annotations

import os
import sys
from types import ModuleType
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from echo_node.host.sensors import nvidia
from echo_node.host.sensors.gpu_reading import GpuReading
from echo_node.host.sensors.kin import HUB, Kin
from echo_node.host.sensors.nvidia import NvidiaSensors, share_of

SECOND = 1_000_000
ENGINE, LEARNER, GAME = 101, 102, 103


class Sample(NamedTuple):
    pid: int
    smUtil: int
    timeStamp: int = SECOND


class KnownKin(Kin):
    def package_of(self, pid: int) -> str:
        return HUB if pid == LEARNER else ""


class Nvml(ModuleType):
    NVML_TEMPERATURE_GPU = 0

    class NVMLError(Exception):
        pass

    class NVMLError_NotFound(NVMLError):
        pass

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.samples: list[Sample] | Exception = []
        self.listed: list[Sample] | Exception = []
        self.shut_down: Exception | None = None

    def nvmlInit(self) -> None:
        pass

    def nvmlShutdown(self) -> None:
        if self.shut_down is not None:
            raise self.shut_down

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, number: int) -> int:
        return number

    def nvmlDeviceGetUUID(self, device: int) -> str | bytes:
        return f"GPU-{device}"

    def nvmlDeviceGetTemperature(self, device: int, kind: int) -> int:
        return 61

    def nvmlDeviceGetPowerUsage(self, device: int) -> int:
        raise self.NVMLError("not supported")

    def nvmlDeviceGetProcessUtilization(self, device: int, since: int) -> Any:
        return _given(self.samples)

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> Any:
        return _given(self.listed)


def _given(answer: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    library = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def used(*, sees_all: bool = True, own: tuple[int, ...] = (ENGINE,)) -> GpuReading:
    sensors = NvidiaSensors(KnownKin())
    with patch.object(nvidia, "sees_the_machines_pids", return_value=sees_all):
        (reading,) = sensors.read(own)
    assert (reading.celsius, reading.watts) == (61.0, None)
    sensors.close()
    return reading


def others(*, sees_all: bool = True, own: tuple[int, ...] = (ENGINE,)) -> float | None:
    return used(sees_all=sees_all, own=own).others


def test_a_machine_without_a_driver_tells_nothing_each_time() -> None:
    sensors = NvidiaSensors()
    try:
        read = [sensors.read((os.getpid(),)) for _ in range(2)]
    finally:
        sensors.close()
    assert read[0] == read[1] == [] or all(one.celsius is not None for one in read[1])


@pytest.mark.parametrize("failure", [ImportError, OSError])
def test_a_machine_without_the_library_tells_nothing(
    failure: type[Exception], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    (tmp_path / "pynvml.py").write_text(f"raise {failure.__name__}('broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    sensors = NvidiaSensors()
    assert sensors.read(()) == sensors.read(()) == []
    sensors.close()
    assert "pynvml" not in sys.modules


def test_the_node_and_its_kin_are_not_others(nvml: Nvml) -> None:
    nvml.samples = [Sample(ENGINE, 40), Sample(LEARNER, 50)]
    assert others() == 0.0
    nvml.samples = [Sample(ENGINE, 40), Sample(LEARNER, 50), Sample(GAME, 30)]
    assert used() == GpuReading(others=0.3, hub=0.5, celsius=61.0, uuid="GPU-0")


def test_in_a_container_the_load_of_others_is_unknown(nvml: Nvml) -> None:
    """In a container, NVIDIA's library reports the process ids that are valid outside: 4711 for the engine, whose id
    inside is 101. So the node cannot tell the engine's load from that of other programs.
    """
    nvml.samples, nvml.listed = [Sample(4_711, 90), Sample(GAME, 30)], [Sample(4_711, 0)]
    assert others(sees_all=False) is None
    nvml.listed = nvml.NVMLError("not supported")
    assert others(sees_all=False) is None
    assert others(sees_all=False, own=()) is None


def test_a_container_with_the_machines_numbers_is_as_good_as_the_machine(nvml: Nvml) -> None:
    nvml.samples = nvml.listed = [Sample(ENGINE, 40), Sample(GAME, 30)]
    assert others(sees_all=False) == 0.3


def test_a_driver_that_does_not_tell_is_not_taken_for_an_idle_gpu(nvml: Nvml) -> None:
    nvml.samples = nvml.NVMLError("not supported")
    assert others() is None
    nvml.samples = nvml.NVMLError_NotFound("no process ran")
    assert others() == 0.0


def test_a_driver_that_is_gone_at_the_end_is_no_error(nvml: Nvml) -> None:
    nvml.shut_down = nvml.NVMLError("uninitialized")
    assert others() == 0.0


def test_a_load_is_the_maximum_of_each_process_in_the_last_second() -> None:
    samples = [(7, 90, 10 * SECOND), (8, 30, 10 * SECOND), (8, 50, 9 * SECOND), (9, 99, 8 * SECOND)]
    assert share_of((8, 9), samples) == 0.5
    assert share_of((9,), samples) == 0.0
    assert share_of((7, 8, 9), samples) == 1.0
    assert share_of((7,), []) == 0.0
