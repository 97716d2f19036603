"""Names of devices in the settings, and the environment variables that hide other devices from an engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from echo_node.host.devices import NOT_HERE, check_names, find, names_here, parse_listed
from echo_node.host.hardware import Gpu, Hardware
from echo_shared.errors import BackendError, ConfigError

A100 = Gpu(name="NVIDIA A100", memory_bytes=40 * 2**30, uuid="GPU-aaaa-1111")
T4 = Gpu(name="Tesla T4", memory_bytes=15 * 2**30, uuid="GPU-bbbb-2222")
LISTED = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaa-1111)
  MIG 3g.20gb     Device  0: (UUID: MIG-c1)
  MIG 3g.20gb     Device  1: (UUID: MIG-GPU-aaaa-1111/2/0)
GPU 1: Tesla T4 (UUID: GPU-bbbb-2222)
"""


def machine(*gpus: Gpu, apple: bool = False) -> Hardware:
    return Hardware(
        cpu_name="CPU", physical_cores=4, usable_cores=8, memory_bytes=2**34, cuda_gpus=gpus, apple_silicon=apple
    )


@pytest.fixture
def driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a script named nvidia-smi first on the path. Its list has a GPU with two parts, and a GPU without parts."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{LISTED}END\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("all",),
        ("cpu",),
        ("gpu",),
        ("cuda:0", "cuda:12"),
        ("vulkan:0", "vulkan:1"),
        ("cuda:0", "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", "MIG-GPU-8932f937-d72c-4106-c12f-20bd9faed9f6/1/2"),
    ],
)
def test_names_that_fit_together(names: tuple[str, ...]) -> None:
    check_names(names)


@pytest.mark.parametrize(
    ("names", "error"),
    [
        (("cuda",), "not the name of a device.*'cuda'"),
        (("cuda:x",), "not the name of a device"),
        (("cuda:0;rm",), "not the name of a device"),
        (("",), "not the name of a device"),
        (("cuda:0", "cuda:0"), "names a device twice"),
        (("all", "cuda:0"), "names a device twice.*all stands alone"),
        (("cpu", "cuda:0"), "one kind of device.*cpu, cuda:0"),
        (("vulkan:0", "cuda:0"), "one kind of device"),
    ],
)
def test_names_that_do_not(names: tuple[str, ...], error: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){error}"):
        check_names(names)


@pytest.mark.parametrize(
    ("name", "variables", "expected", "title"),
    [
        ("cuda:1", {}, {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": "GPU-bbbb-2222"}, "Tesla T4"),
        ("GPU-bbbb", {}, {"CUDA_VISIBLE_DEVICES": "GPU-bbbb"}, "Tesla T4"),
        ("cuda:0", {"CUDA_VISIBLE_DEVICES": "GPU-bbbb-2222"}, {"CUDA_VISIBLE_DEVICES": "GPU-bbbb-2222"}, "Tesla T4"),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "1, 0"}, {"CUDA_VISIBLE_DEVICES": "0"}, ""),
        (
            "cuda:0",
            {"CUDA_VISIBLE_DEVICES": "1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"},
            {"CUDA_VISIBLE_DEVICES": "1"},
            "Tesla T4",
        ),
        ("cuda:0", {"CUDA_VISIBLE_DEVICES": "MIG-c1"}, {"CUDA_VISIBLE_DEVICES": "MIG-c1"}, ""),
        ("vulkan:2", {}, {"GGML_VK_VISIBLE_DEVICES": "2"}, ""),
        ("vulkan:0", {"GGML_VK_VISIBLE_DEVICES": "3,1"}, {"GGML_VK_VISIBLE_DEVICES": "3"}, ""),
        ("cpu", {}, {}, "CPU"),
        ("gpu", {}, {}, ""),
    ],
)
def test_an_engine_sees_only_its_device(
    name: str, variables: dict[str, str], expected: dict[str, str], title: str
) -> None:
    device = find(name, machine(A100, T4), variables)
    assert (device.name, device.environment, device.title) == (name, expected, title)


def test_a_gpu_without_an_id_is_known_by_its_number() -> None:
    old = Gpu(name="old", memory_bytes=2**30)
    assert find("cuda:0", machine(old), {}).environment["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.usefixtures("driver")
def test_a_part_of_a_gpu_belongs_to_its_gpu() -> None:
    device = find("MIG-c1", machine(A100, T4), {})
    assert (device.environment, device.gpu) == ({"CUDA_VISIBLE_DEVICES": "MIG-c1"}, A100)
    assert device.title == "part of NVIDIA A100"


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("name", "variables", "here"),
    [
        ("cuda:2", {}, "cuda:0, cuda:1"),
        ("cuda:1", {"CUDA_VISIBLE_DEVICES": "0"}, "cuda:0"),
        ("cuda:0", {"CUDA_VISIBLE_DEVICES": ""}, "no such device"),
        ("GPU-cccc", {}, "GPU-aaaa-1111, GPU-bbbb-2222"),
        ("MIG-c9", {}, "MIG-c1, MIG-GPU-aaaa-1111/2/0"),
        ("vulkan:1", {"GGML_VK_VISIBLE_DEVICES": "0"}, "vulkan:0"),
    ],
)
def test_a_device_that_is_not_here_is_named(name: str, variables: dict[str, str], here: str) -> None:
    with pytest.raises(BackendError, match=f"(?s)The device {name} is not here.*{here}") as caught:
        find(name, machine(A100, T4), variables)
    assert caught.value.code == NOT_HERE


@pytest.mark.usefixtures("driver")
@pytest.mark.parametrize(
    ("hardware", "vulkan", "variables", "expected"),
    [
        (machine(A100, T4), 0, {}, ("MIG-c1", "MIG-GPU-aaaa-1111/2/0", "cuda:1")),
        (machine(A100, T4), 0, {"CUDA_VISIBLE_DEVICES": "1,0"}, ("cuda:0", "cuda:1")),
        (machine(), 2, {}, ("vulkan:0", "vulkan:1")),
        (machine(apple=True), 0, {}, ("gpu",)),
    ],
)
def test_all_stands_for_every_gpu(
    hardware: Hardware, vulkan: int, variables: dict[str, str], expected: tuple[str, ...]
) -> None:
    assert names_here(("all",), hardware, vulkan, variables) == expected
    assert names_here(("cuda:7",), hardware, vulkan, variables) == ("cuda:7",)


def test_all_without_a_gpu_is_an_error() -> None:
    with pytest.raises(BackendError, match="no GPU that the node could use"):
        names_here(("all",), machine(), 0, {})


def test_the_drivers_list_is_parsed() -> None:
    assert parse_listed(LISTED) == {"GPU-aaaa-1111": ["MIG-c1", "MIG-GPU-aaaa-1111/2/0"], "GPU-bbbb-2222": []}
    assert parse_listed("Failed to initialize NVML") == {}
