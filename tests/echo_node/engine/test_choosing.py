"""A node changes its engine when the machine's devices change."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from echo_node.backends.registry import BackendChoice
from echo_node.core.troubles import Trouble, TroubleCode
from echo_node.engine.choosing import EngineChooser
from echo_node.host import hardware
from echo_node.host.hardware import Hardware
from echo_shared.errors import BackendError

GPU = BackendChoice(name="torch", device="cuda", reason="this machine has a CUDA GPU")
CPU = BackendChoice(name="llama_cpp", device="cpu", reason="this machine has no better device")
FOUND = hardware.detect()


class Machine:
    """Stand-in for a machine. Each detection of the hardware finds the next of `choices` as its best engine; the last
    choice repeats. None: no engine works.
    """

    def __init__(self, *choices: BackendChoice | None) -> None:
        self.left = list(choices)
        self.changed = asyncio.Event()
        self.chooser = EngineChooser(self.look, changed=self.changed, probe_s=0.001)

    def look(self) -> tuple[Hardware, BackendChoice]:
        choice = self.left.pop(0) if len(self.left) > 1 else self.left[0]
        if choice is None:
            raise BackendError("No sampling backend is installed.")
        return FOUND, choice

    def has_changed(self) -> bool:
        """Return True if the choice has changed since the last call."""
        was, _ = self.changed.is_set(), self.changed.clear()
        return was


async def test_a_device_that_vanishes_and_comes_back() -> None:
    machine = Machine(GPU, GPU, CPU, CPU, None, CPU, GPU)
    chooser = machine.chooser
    assert await chooser.decide() == GPU
    assert await chooser.decide() == GPU
    assert (chooser.is_fallback, machine.has_changed()) == (False, False)
    assert await chooser.decide() == CPU
    assert (chooser.is_fallback, machine.has_changed()) == (True, True)
    assert chooser.trouble is not None and chooser.trouble.code is TroubleCode.DEVICE_GONE
    assert "torch on cuda is gone: the node uses llama_cpp on cpu" in chooser.trouble.sentence
    await chooser.until_another()  # Ends when the GPU is found; earlier detections find the old choice or no engine.
    assert chooser.choice == CPU
    assert await chooser.decide() == GPU
    assert (chooser.is_fallback, machine.has_changed()) == (False, True)
    assert chooser.hardware == FOUND and chooser.trouble is None


async def test_a_gpu_that_is_not_used_is_a_trouble(caplog: pytest.LogCaptureFixture) -> None:
    told = "The GPU (gpu) is not used, only the processor: torch on cuda failed (error 304)."
    chooser = Machine(replace(CPU, unused_gpu=told)).chooser
    await chooser.decide()
    assert chooser.trouble == Trouble(TroubleCode.GPU_UNUSED, told) and told in caplog.text


async def test_a_machine_that_wakes_up_is_looked_at_at_once() -> None:
    machine = Machine(GPU, CPU, GPU)
    chooser = EngineChooser(machine.look, changed=machine.changed, probe_s=100_000.0)
    await chooser.decide()
    await chooser.decide()
    chooser.look_again()
    async with asyncio.timeout(60):
        await chooser.until_another()
    await chooser.decide()
    assert chooser.trouble is None


async def test_new_settings_set_the_choice_to_return_to() -> None:
    machine = Machine(GPU, CPU, GPU)
    chooser = machine.chooser
    await chooser.decide()
    chooser.renew()
    assert await chooser.decide() == CPU
    assert (chooser.is_fallback, machine.has_changed()) == (False, True)
    assert await chooser.decide() == GPU
    assert (chooser.is_fallback, machine.has_changed()) == (True, True)


async def test_a_machine_without_an_engine_reports_it() -> None:
    with pytest.raises(BackendError):
        await Machine(None).chooser.decide()


async def test_the_reason_alone_is_no_change() -> None:
    machine = Machine(CPU, BackendChoice(name="llama_cpp", device="cpu", reason="measured"))
    chooser = machine.chooser
    await chooser.decide()
    await chooser.decide()
    assert (chooser.is_fallback, machine.has_changed()) == (False, False)
