"""This machine, and answers of nvidia-smi that have been seen or must be feared."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest

from echo_node.host import hardware
from echo_node.host.hardware import Gpu, Hardware, detect, parse_nvidia_smi

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
