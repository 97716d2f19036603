"""Some GPUs work only in a wider cage (sandbox), so there are several, from narrow to wide. A stub of NVIDIA's driver
makes the driver's system calls in the real cages.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from echo_shared.cage.guards import GUARDS
from echo_shared.cage.leeway import BY_NAME, LEEWAYS, NO_CAGE, SEALED

START = """
import sys
from pathlib import Path
from echo_node.backends import cuda_driver
from echo_shared.cage.description import Cage
from echo_shared.cage.entering import enter
from echo_shared.cage.leeway import BY_NAME
from echo_shared.errors import BackendError
enter(Cage(gpu=True, reads=(Path(sys.argv[2]),), leeway=BY_NAME[sys.argv[1]]))
try:
    cuda_driver.start()
except BackendError as error:
    print(error.what)
"""


def test_steps_go_from_narrow_to_wide() -> None:
    assert LEEWAYS[0] is SEALED and LEEWAYS[-1] is NO_CAGE and set(NO_CAGE.lacks) == set(GUARDS)
    assert not SEALED.lacks and list(BY_NAME) == [step.name for step in LEEWAYS]
    assert all(step.why.endswith(step.what) and f'"{step.name}"' in step.why for step in LEEWAYS)


def started(step: str, stub_cuda: Path) -> str:
    said = subprocess.run(
        [sys.executable, "-c", START, step, str(stub_cuda)], capture_output=True, text=True, check=True, timeout=120
    )
    return said.stdout.strip()


@pytest.mark.skipif(sys.platform != "linux", reason="Linux's own")
@pytest.mark.parametrize(
    ("needs", "first"),
    [
        ("", "listening socket"),
        ("connect {directory}/service", "local sockets"),
        ("read /etc/passwd", "system files"),
        ("fork", "no call filter"),
        ("read {directory}/private", "no file rules"),
    ],
)
def test_a_driver_starts_from_the_first_step_that_allows_its_calls(
    needs: str, first: str, stub_cuda: Path, service: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(service.parent))
    (service.parent / "private").write_bytes(b"x")
    monkeypatch.setenv("STUB_CUDA_NEEDS", needs.format(directory=service.parent))
    names = [step.name for step in LEEWAYS]
    before = names[names.index(first) - 1]
    assert started(before, stub_cuda).startswith("CUDA does not start: cuInit failed with error 304: OS call failed")
    assert started(first, stub_cuda) == ""
