"""The engine that the registry chooses for a machine, if some packages are missing."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from echo_node.backends import registry
from echo_node.host.hardware import Gpu, Hardware
from echo_shared.errors import BackendError
from echo_shared.installation import how_to_install

PLAIN = Hardware(
    cpu_name="cpu", physical_cores=2, usable_cores=2, memory_bytes=2**33, cuda_gpus=(), apple_silicon=False
)
WITH_GPU = Hardware(
    cpu_name="cpu",
    physical_cores=2,
    usable_cores=2,
    memory_bytes=2**33,
    cuda_gpus=(Gpu(name="gpu", memory_bytes=2**33),),
    apple_silicon=False,
)
WITH_BIG_GPU = replace(WITH_GPU, cuda_gpus=(Gpu(name="gpu", memory_bytes=24 * 2**30),))
APPLE = replace(PLAIN, apple_silicon=True)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Return a set of packages to hide; all other packages of the registry count as installed."""
    hidden: set[str] = set()

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in hidden else ModuleSpec(name, None)

    monkeypatch.setattr(importlib.util, "find_spec", find)
    return hidden


def test_cpu_gets_llama_cpp() -> None:
    choice = registry.choose(PLAIN)
    assert (choice.name, choice.device) == ("llama_cpp", "cpu")


def test_a_gpu_with_a_torch_that_can_use_it_gets_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_torch_has_cuda", lambda: True)
    choice = registry.choose(WITH_GPU)
    assert (choice.name, choice.device) == ("torch", "cuda")


def test_a_gpu_with_a_torch_that_cannot_use_it_gets_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_torch_has_cuda", lambda: False)
    assert registry.choose(WITH_GPU).name == "llama_cpp"
    assert registry.choose(WITH_GPU, "torch").device == "cpu"


def test_an_unused_gpu_is_reported_with_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_llama_has_gpu", lambda: False)
    monkeypatch.setattr(registry, "_torch_has_cuda", lambda: False)
    for requested in ("auto", "torch"):
        unused = registry.choose(WITH_GPU, requested).unused_gpu
        assert unused.startswith("The GPU (gpu) is not used, only the processor: The torch backend cannot use the GPU.")
        assert "https://pytorch.org/get-started/locally/" in unused
    assert "no requested engine can use it" in registry.choose(WITH_GPU, "llama_cpp").unused_gpu
    assert registry.choose(PLAIN).unused_gpu == ""
    assert "its driver does not answer" in registry.choose(replace(PLAIN, silent_gpu=True)).unused_gpu


def test_a_gpu_that_failed_its_measurement_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_llama_has_gpu", lambda: False)
    monkeypatch.setattr(registry, "_torch_has_cuda", lambda: True)
    rates = {("torch", "cuda"): 0.0, ("llama_cpp", "cpu"): 9.0, ("torch", "cpu"): 8.0}
    failed = registry.choose(WITH_GPU, "auto", rates, {("torch", "cuda"): "CUDA does not start"})
    assert failed.device == "cpu"
    assert "torch on cuda failed (CUDA does not start). Repair it, then run: echo-node bench." in failed.unused_gpu
    partly = registry.choose(WITH_GPU, "torch", {("torch", "cuda"): 0.0}, {("torch", "cuda"): "CUDA does not start"})
    assert (partly.device, partly.unused_gpu) == ("cpu", failed.unused_gpu), "not all engines were measured"
    slower = registry.choose(WITH_GPU, "auto", {**rates, ("torch", "cuda"): 1.0})
    assert (slower.device, slower.unused_gpu) == ("cpu", ""), "the GPU works, but the processor is faster"
    assert registry.choose(WITH_GPU, "auto", {**rates, ("torch", "cuda"): 99.0}).unused_gpu == ""


@pytest.mark.parametrize(("platform", "name"), [("linux", "vllm"), ("win32", "torch")])
def test_a_big_gpu_gets_vllm_on_linux(
    platform: str, name: str, without: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_torch_has_cuda", lambda: True)
    monkeypatch.setattr(sys, "platform", platform)
    choice = registry.choose(WITH_BIG_GPU)
    assert (choice.name, choice.device) == (name, "cuda")


def test_vllm_is_not_for_small_gpus(without: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_torch_has_cuda", lambda: True)
    assert registry.choose(WITH_GPU).name == "torch"
    with pytest.raises(BackendError) as caught:
        registry.choose(WITH_GPU, "vllm")
    assert (caught.value.code, caught.value.got) == (registry.NO_DEVICE, "no CUDA GPU of 12 GB on Linux")


def test_apple_silicon_gets_mlx_on_its_gpu(without: set[str]) -> None:
    assert [(c.name, c.device) for c in (registry.choose(APPLE), registry.choose(APPLE, "mlx"))] == [("mlx", "gpu")] * 2
    without.add("mlx_lm")
    assert registry.choose(APPLE).name == "llama_cpp"


def test_mlx_on_a_cpu_is_used_only_on_request(without: set[str]) -> None:
    choice = registry.choose(PLAIN, "mlx")
    assert (choice.name, choice.device) == ("mlx", "cpu")
    without.update({"llama_cpp", "torch"})
    with pytest.raises(BackendError):
        registry.choose(PLAIN)


def test_mlx_on_a_cpu_need_not_be_measured(without: set[str]) -> None:
    rates = {("llama_cpp", "cpu"): 1.0, ("torch", "cpu"): 2.0}
    assert registry.choose(PLAIN, measured=rates).name == "torch"


def test_torch_is_the_fallback(without: set[str]) -> None:
    without.add("llama_cpp")
    choice = registry.choose(PLAIN)
    assert (choice.name, choice.device, choice.reason) == ("torch", "cpu", "llama.cpp is not installed")


def test_the_request_wins() -> None:
    assert registry.choose(PLAIN, "torch").name == "torch"


@pytest.mark.parametrize(
    ("hardware", "requested", "extra"),
    [
        (PLAIN, "auto", "cpu"),
        (WITH_GPU, "auto", "cuda"),
        (PLAIN, "llama_cpp", "cpu"),
        (PLAIN, "torch", "cuda"),
        (PLAIN, "mlx", "mlx"),
        (APPLE, "auto", "mlx"),
        (WITH_BIG_GPU, "vllm", "vllm"),
    ],
)
def test_without_packages_the_error_says_how_to_install(
    hardware: Hardware, requested: str, extra: str, without: set[str]
) -> None:
    without.update({"gguf", "transformers", "mlx", "vllm"})
    with pytest.raises(BackendError) as caught:
        registry.choose(hardware, requested)
    assert caught.value.do == how_to_install(extra)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(BackendError, match="no such backend"):
        registry.choose(PLAIN, "vaporware")


BOTH = {("llama_cpp", "cpu"): 100.0, ("torch", "cpu"): 150.0}


def test_the_fastest_wins_once_all_are_measured() -> None:
    choice = registry.choose(PLAIN, "auto", BOTH)
    assert (choice.name, choice.device) == ("torch", "cpu")
    assert choice.reason == "measured the fastest: 150 tokens/s"
    assert registry.choose(PLAIN, "auto", {**BOTH, ("torch", "cpu"): 50.0}).name == "llama_cpp"


@pytest.mark.parametrize(
    "measured", [{}, {("torch", "cpu"): 150.0}, {("llama_cpp", "cpu"): 0.0, ("torch", "cpu"): 0.0}]
)
def test_without_figures_of_all_the_order_of_preference_holds(measured: dict[tuple[str, str], float]) -> None:
    assert registry.choose(PLAIN, "auto", measured).name == "llama_cpp"


def test_a_failed_engine_is_not_chosen_by_its_order() -> None:
    assert registry.choose(PLAIN, "auto", {**BOTH, ("llama_cpp", "cpu"): 0.0}).name == "torch"


def test_figures_do_not_override_the_request() -> None:
    assert registry.choose(PLAIN, "llama_cpp", BOTH).name == "llama_cpp"


def test_measurements_of_uninstalled_engines_do_not_count(without: set[str]) -> None:
    without.add("transformers")
    choice = registry.choose(PLAIN, "auto", BOTH)
    assert (choice.name, choice.reason) == ("llama_cpp", "this machine has no better device")


def test_the_survey_names_missing_packages(without: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_torch_has_cuda", lambda: False)
    without.add("gguf")
    found = {(one.choice.name, one.choice.device): one.missing for one in registry.survey(WITH_GPU)}
    assert found["torch", "cpu"] is None
    assert (missing := found["llama_cpp", "cpu"]) is not None and missing.got == "no gguf"
    assert (unfit := found["torch", "cuda"]) is not None and "without CUDA" in str(unfit.got)
    on_plain = {(one.choice.name, one.choice.device): one.missing for one in registry.survey(PLAIN)}
    assert (absent := on_plain["torch", "cuda"]) is not None and absent.code == registry.NO_DEVICE


@pytest.mark.parametrize("name", ["torch", "llama_cpp"])
def test_an_engines_install_command_names_its_distributions(name: str) -> None:
    command = registry.reinstall(name)
    distribution = registry.software(name).split()[0]
    assert command.startswith(sys.executable) and distribution in command


@pytest.mark.parametrize("name", ["torch", "llama_cpp"])
def test_an_engines_software_name_does_not_depend_on_its_discovery(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    by_its_name = registry.software(name)
    looked_up = replace(registry._BACKENDS[name], distribution="of-another-name")
    monkeypatch.setitem(registry._BACKENDS, name, looked_up)
    assert registry.software(name) == by_its_name


def test_a_llama_cpp_that_was_built_for_a_gpu_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert registry.choose(PLAIN, "llama_cpp").device == "cpu"
    library = tmp_path / "lib" / "libggml-vulkan.so"
    library.parent.mkdir()
    spec = ModuleSpec("llama_cpp", None, origin=str(tmp_path / "__init__.py"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llama_cpp" else find_spec(name))
    (tmp_path / "lib" / "libggml-cpu.so").touch()
    assert registry.choose(PLAIN, "llama_cpp").device == "cpu"
    library.touch()
    assert registry.choose(PLAIN, "llama_cpp").device == "gpu"


@pytest.mark.parametrize(("answer", "device"), [("0", "gpu"), ("1", "cpu")])
def test_a_llama_cpp_for_every_machine_is_asked_whether_there_is_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: str, device: str
) -> None:
    package = tmp_path / "llama_cpp"
    (package / "lib").mkdir(parents=True)
    (package / "lib" / "libggml-vulkan.so").touch()
    (package / "lib" / "libggml-cpu-haswell.so").touch()
    spec = ModuleSpec("llama_cpp", None, origin=str(package / "__init__.py"))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec if name == "llama_cpp" else find_spec(name))
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\nexit {answer}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(registry.sys, "executable", str(interpreter))
    registry._llama_finds_gpu.cache_clear()
    assert registry.choose(PLAIN, "llama_cpp").device == device
    registry._llama_finds_gpu.cache_clear()
