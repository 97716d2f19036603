"""Which cage (sandbox) a node chooses for a GPU's driver, from narrow to wide, and how the choice is stored. The driver
is a stub; the cages are real.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from echo_node.backends import gpu_cage
from echo_node.backends.gpu_cage import GPU_UNUSABLE, KEPT_S, GpuCages
from echo_node.backends.registry import BackendChoice
from echo_shared.cage.leeway import LEEWAYS, SEALED
from echo_shared.errors import BackendError

CUDA = BackendChoice(name="torch", device="cuda", reason="test")
START = {"torch": ("from echo_node.backends import cuda_driver; cuda_driver.start()",)}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux's own")


@pytest.mark.usefixtures("stub_cuda")
@pytest.mark.parametrize(("needs", "step"), [("", "listening socket"), ("connect {service}", "local sockets")])
def test_the_narrowest_cage_is_found(
    needs: str, step: str, service: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STUB_CUDA_NEEDS", needs.format(service=service))
    terms = GpuCages(tmp_path / "cages.json", starts=START).terms(CUDA, "auto", tmp_path)
    assert terms.leeway.name == step and terms.policies == tmp_path
    assert type(terms).from_frame(terms.to_frame()) == terms


@pytest.mark.usefixtures("stub_cuda")
def test_a_gpu_that_never_starts_is_reported_with_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_CUDA_NEEDS", "nothing works")
    file = tmp_path / "cages.json"
    with pytest.raises(BackendError) as caught:
        GpuCages(file, starts=START).terms(CUDA, "auto")
    assert caught.value.code == GPU_UNUSABLE and "cuInit failed with error 100" in str(caught.value.got)
    assert "echo-node doctor" in str(caught.value.do) and not file.exists(), "a driver may be repaired at any time"


def working_from(step: str) -> tuple[list[str], Callable[[str], str | None]]:
    """Return a list of the cages tried so far, and a stand-in for the probe of a cage: it succeeds from the cage named
    `step` on.
    """
    names, tried = [one.name for one in LEEWAYS], list[str]()

    def probe(code: str) -> str | None:
        tried.append(next(name for name in names if f"{name!r})" in code))
        return None if names.index(tried[-1]) >= names.index(step) else "exit status 1: refused"

    return tried, probe


def test_a_found_step_is_probed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, probe = working_from("listening socket")
    cages = GpuCages(tmp_path / "cages.json", starts=START, probe=probe)
    assert [cages.find(CUDA, "auto").leeway.name for _ in range(2)] == ["listening socket"] * 2
    assert tried == ["sealed", "no cage", "listening socket"]
    monkeypatch.setattr(gpu_cage, "_version", lambda module: "999.0")
    assert cages.find(CUDA, "auto").leeway.name == "listening socket" and len(tried) == 6, "another driver"


def test_quick_probes_come_first(tmp_path: Path) -> None:
    """The node tries cages from narrow to wide. Fast probes of the driver come first: they skip cages in which the
    driver fails, so the slow probes of the engine's library start at the first cage in which the driver works.
    """
    tried: list[str] = []

    def probe(code: str) -> str | None:
        needs = 3 if "library" in code else 1
        tried.append(code.splitlines()[-1])
        return None if next(at for at, step in enumerate(LEEWAYS) if f"{step.name!r})" in code) >= needs else "refused"

    cages = GpuCages(tmp_path / "cages.json", starts={"torch": ("driver", "library")}, probe=probe)
    assert cages.find(CUDA, "auto").leeway is LEEWAYS[3]
    assert tried == ["driver"] * 3 + ["library"] * 4


def test_a_wide_cage_is_looked_for_again_after_a_week(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried, probe = working_from("system files")
    cages = GpuCages(tmp_path / "cages.json", probe=probe)
    assert cages.find(CUDA, "auto").leeway.lacks
    count, now = len(tried), time.time()
    cages.find(CUDA, "auto")
    assert len(tried) == count
    monkeypatch.setattr(time, "time", lambda: now + KEPT_S + 1)
    cages.find(CUDA, "auto")
    assert len(tried) == 2 * count


def test_a_damaged_file_is_replaced_by_a_new_search(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "cages.json").write_text("{")
    _, probe = working_from("sealed")
    assert GpuCages(tmp_path / "cages.json", probe=probe).find(CUDA, "auto").leeway is SEALED
    assert "cannot be read" in caplog.text


def test_without_a_cage_or_a_gpu_nothing_is_tried(tmp_path: Path) -> None:
    tried, probe = working_from("no cage")
    cages = GpuCages(tmp_path / "cages.json", probe=probe)
    on_cpu = BackendChoice(name="torch", device="cpu", reason="test")
    vllm = BackendChoice(name="vllm", device="cuda", reason="test")
    assert cages.find(CUDA, "off") == cages.find(on_cpu, "auto") == cages.find(vllm, "auto") and not tried
