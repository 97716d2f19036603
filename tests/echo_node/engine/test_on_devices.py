"""One kind of engine for all devices that the owner has chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from echo_node.backends import registry
from echo_node.backends.base import EngineSettings
from echo_node.backends.registry import BackendChoice
from echo_node.engine.fitting import chosen, place_of
from echo_node.engine.on_devices import CommonBackend, named_devices, seen_by
from echo_node.engine.speeds import SpeedBook, Speeds
from echo_node.host import devices
from echo_node.host.devices import Device
from echo_node.host.hardware import Gpu, Hardware
from echo_shared.errors import BackendError

BIG = Gpu(name="big", memory_bytes=24 * 2**30, uuid="GPU-0")
SMALL = Gpu(name="small", memory_bytes=8 * 2**30, uuid="GPU-1")
BOTH = Hardware(
    cpu_name="cpu", physical_cores=4, usable_cores=4, memory_bytes=2**34, cuda_gpus=(BIG, SMALL), apple_silicon=False
)
NAMES = ("cuda:0", "cuda:1")
SETTINGS = EngineSettings()


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return the set of packages that count as installed, for a test to change. PyTorch is built for CUDA, llama.cpp
    only for the processor.
    """
    found = {"torch", "transformers", "vllm", "llama_cpp", "gguf"}
    monkeypatch.setattr(registry, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(registry, "_llama_gpu_kinds", lambda: frozenset())
    monkeypatch.setattr(registry, "_is_present", lambda package: package in found)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return found


@pytest.fixture
def book(tmp_path: Path) -> SpeedBook:
    return SpeedBook(tmp_path / "speeds.json")


def common(book: SpeedBook, wanted: str = "auto", names: tuple[str, ...] = NAMES) -> str:
    return CommonBackend().find(book, BOTH, "base", SETTINGS, wanted, names)


def choice_on(name: str, backend: str) -> tuple[BackendChoice, Hardware]:
    device = devices.find(name, BOTH, {})
    return BackendChoice(name=backend, device="cuda", reason="", on=device), seen_by(device, BOTH)


def remember(book: SpeedBook, name: str, backend: str, rate: float) -> None:
    choice, seen = choice_on(name, backend)
    row = {"kind": "decode", "width": 8, "tokens": 10, "seconds": 1.0, "tokens_per_s": rate}
    book.remember(place_of(choice, seen, "base"), SETTINGS, Speeds.now([row]))


def test_the_best_backend_that_suits_all_devices_is_common(book: SpeedBook) -> None:
    assert common(book, names=("cuda:0",)) == "vllm"
    assert common(book) == "torch", "the small card has no room for vLLM"
    with pytest.raises(BackendError, match="No sampling engine can use all devices"):
        common(book, "vllm")


def test_the_first_common_backend_stays(book: SpeedBook) -> None:
    kept = CommonBackend()
    assert kept.find(book, replace(BOTH, cuda_gpus=(BIG,)), None, SETTINGS, "auto", NAMES) == "vllm"
    assert kept.find(book, BOTH, None, SETTINGS, "auto", NAMES) == "vllm"
    choice = devices.find("cuda:1", BOTH, {})
    with pytest.raises(BackendError, match="The device cuda:1 cannot be used: the vllm backend for it is missing"):
        chosen(book, seen_by(choice, BOTH), None, SETTINGS, "vllm", on=choice)


def test_speeds_are_kept_by_device_and_summed(book: SpeedBook, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_VLLM_GPU_BYTES", 0)
    for name, torch_rate, vllm_rate in (("cuda:0", 100.0, 200.0), ("cuda:1", 150.0, 40.0)):
        assert common(book) == "vllm", "not all are measured"
        remember(book, name, "torch", torch_rate)
        remember(book, name, "vllm", vllm_rate)
    assert common(book) == "torch", "100 + 150 > 200 + 40"
    device = devices.find("cuda:1", BOTH, {})
    found = book.find(place_of(choice_on("cuda:1", "torch")[0], seen_by(device, BOTH), "base"), SETTINGS)
    assert found is not None and found.best == 150.0


def test_llama_cpp_needs_a_build_for_the_devices_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    vulkan = devices.find("vulkan:0", BOTH, {})
    with pytest.raises(BackendError, match="The device vulkan:0 cannot be used"):
        registry.choose(BOTH, "llama_cpp", on=vulkan)
    monkeypatch.setattr(registry, "_llama_gpu_kinds", lambda: frozenset({"vulkan"}))
    monkeypatch.setattr(registry, "_llama_libraries", lambda: ["libggml-vulkan.so"])
    found = registry.choose(BOTH, on=vulkan)
    assert (found.name, found.device, found.label) == ("llama_cpp", "gpu", "vulkan:0")
    assert found.environment == {"GGML_VK_VISIBLE_DEVICES": "0"}
    with pytest.raises(BackendError, match="The device cuda:0 cannot be used"):
        registry.choose(BOTH, "llama_cpp", on=devices.find("cuda:0", BOTH, {}))


def test_the_processor_may_be_chosen_on_a_machine_with_gpus(installed: set[str]) -> None:
    cpu = devices.find("cpu", BOTH, {})
    found = registry.choose(seen_by(cpu, BOTH), on=cpu)
    assert (found.name, found.device, found.unused_gpu) == ("llama_cpp", "cpu", "")
    assert seen_by(cpu, BOTH).cuda_gpus == (), "the hub learns the kind of device from this"
    installed.clear()
    with pytest.raises(BackendError, match="cpu cannot be used: a sampling engine for it is missing"):
        registry.choose(BOTH, on=cpu)


def test_an_engine_sees_its_gpu_unless_that_is_unknown() -> None:
    assert [seen_by(devices.find(name, BOTH, {}), BOTH).cuda_gpus for name in NAMES] == [(BIG,), (SMALL,)]
    unknown = Device(name="cuda:0", api="cuda")
    assert seen_by(unknown, BOTH) == BOTH


def test_all_is_replaced_by_the_machines_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "_parts", dict)
    assert named_devices(("all",), BOTH) == NAMES
    assert named_devices((), BOTH) == ()
    monkeypatch.setattr(registry, "vulkan_devices", lambda: 2)
    assert named_devices(("all",), replace(BOTH, cuda_gpus=())) == ("vulkan:0", "vulkan:1")
