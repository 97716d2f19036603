"""The hardware that a node detects: that of this machine, and GPUs in real and invented outputs of nvidia-smi."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_node.host import hardware
from echo_node.host.hardware import Gpu, Hardware, detect, parse_cpu_max, parse_nvidia_smi

GIB = 2**30


def test_this_machine() -> None:
    found = detect()
    assert found.usable_cores >= 1
    assert found.physical_cores >= 1
    assert 1 <= hardware.sensible_threads() <= found.usable_cores
    assert found.memory_bytes > 2**28
    assert found.cpu_name
    assert len(found.summary) <= 128


@pytest.mark.parametrize(
    ("output", "gpus"),
    [
        ("", ()),
        ("NVIDIA GeForce RTX 4090, 24564\n", (Gpu(name="NVIDIA GeForce RTX 4090", memory_bytes=24_564 * 2**20),)),
        ("A, B, 1\nC, 2\n", (Gpu(name="A, B", memory_bytes=2**20), Gpu(name="C", memory_bytes=2**21))),
        ("NVIDIA GB10, [N/A]\n", (Gpu(name="NVIDIA GB10", memory_bytes=0),)),
        ("NVIDIA-SMI has failed because it could not communicate with the driver.\n", ()),
    ],
)
def test_parse_nvidia_smi(output: str, gpus: tuple[Gpu, ...]) -> None:
    assert parse_nvidia_smi(output) == gpus


@pytest.mark.parametrize("script", ["exit 9", "printf 'Some GPU, 100\\n'"])
def test_nvidia_smi_is_asked(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setattr(hardware, "_NVIDIA_SMI", (str(tool),))
    expected = () if "exit" in script else (Gpu(name="Some GPU", memory_bytes=100 * 2**20),)
    assert detect().cuda_gpus == expected


def test_an_unknown_system_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "_CPUINFO", tmp_path / "absent")
    monkeypatch.setattr(hardware, "_NVIDIA_SMI", (str(tmp_path / "absent"),))
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "")
    found = detect()
    assert (found.cpu_name, found.cuda_gpus) == ("unknown CPU", ())


def test_summary_is_short() -> None:
    gpus = tuple(Gpu(name="A rather long name of a GPU", memory_bytes=80 * GIB) for _ in range(8))
    found = Hardware(
        cpu_name="x" * 200, physical_cores=4, usable_cores=8, memory_bytes=GIB, cuda_gpus=gpus, apple_silicon=False
    )
    assert len(found.summary) == 128
    assert found.summary.startswith("A rather long name of a GPU 80 GiB; ")


@given(st.text())
def test_any_answer_of_nvidia_smi_is_survived(output: str) -> None:
    for gpu in parse_nvidia_smi(output):
        assert gpu.name and gpu.memory_bytes >= 0


@pytest.mark.parametrize(
    "output",
    [
        "Failed to initialize NVML: Driver/library version mismatch, see the log\n",
        "Unable to determine the device handle for GPU 0000:01:00.0: Unknown Error, reboot\n",
        "A GPU, -5\n",
        "A GPU, " + "9" * 5_000,
        ", 100\n",
        "A GPU, \u0663\n",
    ],
)
def test_an_error_text_is_no_gpu(output: str) -> None:
    assert parse_nvidia_smi(output) == ()


def test_an_nvidia_smi_that_hangs_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\nexec sleep 1000\n")
    tool.chmod(0o755)
    monkeypatch.setattr(hardware, "_NVIDIA_SMI", (str(tool),))
    monkeypatch.setattr(hardware, "_NVIDIA_SMI_TIMEOUT_S", 0.05)
    assert detect().cuda_gpus == ()


def test_psutil_may_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("sysctl is gone")

    monkeypatch.setattr(psutil, "virtual_memory", fail)
    monkeypatch.setattr(psutil, "cpu_count", fail)
    found = detect()
    assert found.memory_bytes == 0 and found.physical_cores >= 1
    assert found.summary


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("200000 100000\n", 2.0),
        ("50000 100000", 0.5),
        ("max 100000\n", hardware._UNLIMITED),
        ("-1 100000", hardware._UNLIMITED),
        ("0 100000", hardware._UNLIMITED),
        ("100000 0", hardware._UNLIMITED),
        ("", hardware._UNLIMITED),
    ],
)
def test_parse_cpu_max(text: str, cores: float) -> None:
    assert parse_cpu_max(text) == cores


@given(st.text())
def test_any_quota_is_survived(text: str) -> None:
    assert parse_cpu_max(text) > 0


class Groups:
    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        monkeypatch.setattr(hardware, "_CGROUPS", root)
        monkeypatch.setattr(hardware, "_CGROUPS_OF_THIS_PROCESS", root / "self")
        monkeypatch.setattr(os, "cpu_count", lambda: 16)
        if hasattr(os, "sched_getaffinity"):
            monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))

    def put(self, path: str, text: str) -> None:
        (self._root / path).parent.mkdir(parents=True, exist_ok=True)
        (self._root / path).write_text(text)


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(tmp_path, monkeypatch)


def test_a_container_has_its_share_of_the_cores(groups: Groups) -> None:
    groups.put("self", "0::/\n")
    assert detect().usable_cores == 16
    groups.put("cpu.max", "250000 100000\n")
    assert detect().usable_cores == 3
    groups.put("cpu.max", "1000 100000\n")
    assert detect().usable_cores == 1


def test_the_least_quota_of_the_groups_above_counts(groups: Groups) -> None:
    groups.put("self", "0::/user.slice/app.scope\n")
    groups.put("user.slice/app.scope/cpu.max", "max 100000\n")
    groups.put("user.slice/cpu.max", "400000 100000\n")
    groups.put("other.slice/cpu.max", "100000 100000\n")
    assert detect().usable_cores == 4


def test_groups_of_the_first_version(groups: Groups) -> None:
    groups.put("self", "9:memory:/docker/x\n3:cpu,cpuacct:/docker/x\n0::/\n")
    groups.put("cpu,cpuacct/docker/x/cpu.cfs_quota_us", "200000\n")
    groups.put("cpu,cpuacct/docker/x/cpu.cfs_period_us", "100000\n")
    assert detect().usable_cores == 2
    groups.put("cpu,cpuacct/docker/x/cpu.cfs_quota_us", "-1\n")
    assert detect().usable_cores == 16


@given(st.text())
def test_any_list_of_groups_is_survived(text: str) -> None:
    for directory in hardware._cgroup_directories(text):
        assert ".." not in directory.parts
        hardware._quota(directory)


@pytest.mark.parametrize(
    ("vendor", "kind", "expected"),
    [("0x10de", "0x030200", True), ("0x10de", "0x040300", False), ("0x1002", "0x030000", False)],
)
def test_a_card_whose_driver_is_silent_is_seen_on_the_bus(
    vendor: str, kind: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent GPU: an NVIDIA card that is on the PCI bus but that no driver reports. Sound devices and other makers'
    cards do not count.
    """
    device = tmp_path / "0000:01:00.0"
    device.mkdir()
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{kind}\n")
    (tmp_path / "0000:02:00.0").mkdir()
    monkeypatch.setattr(hardware, "_PCI", tmp_path)
    monkeypatch.setattr(hardware, "_cuda_gpus", tuple)
    assert hardware.detect().silent_gpu is expected
    monkeypatch.setattr(hardware, "_cuda_gpus", lambda: (hardware.Gpu(name="a GPU", memory_bytes=0),))
    assert hardware.detect().silent_gpu is False
