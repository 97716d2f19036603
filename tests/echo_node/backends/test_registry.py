"""Which engine a machine gets, with this environment's packages, and without some of them."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from echo_node.backends import registry
from echo_node.host.hardware import Gpu, Hardware
from echo_shared.errors import BackendError

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


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Packages put into this set are not found."""
    hidden: set[str] = set()
    find_spec = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in hidden else find_spec(name, package)

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


def test_torch_is_the_fallback(without: set[str]) -> None:
    without.add("llama_cpp")
    choice = registry.choose(PLAIN)
    assert (choice.name, choice.device, choice.reason) == ("torch", "cpu", "llama.cpp is not installed")


def test_the_request_wins() -> None:
    assert registry.choose(PLAIN, "torch").name == "torch"


@pytest.mark.parametrize(
    ("hardware", "requested", "command"),
    [
        (PLAIN, "auto", "echo-swarm[cpu]"),
        (WITH_GPU, "auto", "echo-swarm[cuda]"),
        (PLAIN, "llama_cpp", "echo-swarm[cpu]"),
        (PLAIN, "torch", "echo-swarm[cuda]"),
    ],
)
def test_without_packages_the_error_says_how_to_install(
    hardware: Hardware, requested: str, command: str, without: set[str]
) -> None:
    without.update({"gguf", "transformers"})
    with pytest.raises(BackendError) as caught:
        registry.choose(hardware, requested)
    assert caught.value.do is not None
    assert command in caught.value.do


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(BackendError, match="no such backend"):
        registry.choose(PLAIN, "vaporware")
