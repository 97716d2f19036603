"""llama.cpp finds its devices compiled in (a build for one machine) or in files (as in wheelhouses), which it loads
only from its own package.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

ROOT: Final = Path(__file__).resolve().parents[3]
LOOK: Final = """
import ctypes, json, pathlib
import llama_cpp
from echo_shared.gguf.llama_cpp_devices import ggml, has_gpu, load_devices
load_devices()
load_devices()
loaded = {line.split()[-1] for line in open("/proc/self/maps") if "ggml-cpu" in line}
print(json.dumps({
    "devices": ggml().ggml_backend_dev_count(),
    "backends": ggml().ggml_backend_reg_count(),
    "system": llama_cpp.llama_print_system_info().decode(),
    "rpc": llama_cpp.llama_supports_rpc(),
    "gpu": has_gpu(),
    "from": sorted(loaded),
    "package": str(pathlib.Path(llama_cpp.__file__).parent),
}))
"""


DRAW: Final = """
import json, sys
from itertools import chain
from pathlib import Path
import numpy as np
from echo_node.backends.base import EngineSettings
from echo_node.backends.llama_cpp_engine import LlamaCppEngine
from echo_shared.sampling.interface import FinishedRollout, GroupRequest

base, adapter, derived = map(Path, sys.argv[1:])
request = GroupRequest(
    lease_id=1, group_id=1, indices=(0, 1, 2, 3), prompt_ids=np.arange(3, 8, dtype=np.int32), seed=7, policy_version=1,
    temperature=1.0, max_tokens=24, stop_ids=(),
)
drawn = {}
for device in ("cpu", "vulkan"):
    engine = LlamaCppEngine()
    engine.open(base, derived, EngineSettings(width=4, threads=1, device=device, precision="f32"))
    engine.set_policy(engine.prepare(adapter))
    events = list(chain.from_iterable(engine.sample(iter([request]))))
    rollouts = sorted((e for e in events if isinstance(e, FinishedRollout)), key=lambda e: e.index)
    drawn[device] = [(e.completion_ids.tolist(), e.behavior_logprobs.tolist()) for e in rollouts]
    engine.close()
print(json.dumps(drawn))
"""
LAVAPIPE: Final = Path("/usr/share/vulkan/icd.d/lvp_icd.x86_64.json")
"""Mesa's Vulkan driver that computes on the processor (Debian: mesa-vulkan-drivers)."""


def look(directory: Path, *before: Path) -> dict[str, Any]:
    """Return the devices that llama.cpp finds in a process whose current directory is `directory`. Packages in the
    directories `before` replace those of this environment.
    """
    paths = os.pathsep.join(map(str, [*before, ROOT / "edge_client", ROOT / "shared"]))
    ran = subprocess.run(
        [sys.executable, "-c", LOOK],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_devices_inside_are_left_alone(tmp_path: Path) -> None:
    found = look(tmp_path)
    assert found["devices"] >= 1
    assert found["backends"] >= 1 and len(found["from"]) == 1


@pytest.fixture(scope="module")
def portable(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return llama.cpp as built for any processor, from the wheelhouse in dist/."""
    wheels = [*(ROOT / "dist" / "wheelhouse" / "wheels").glob("llama_cpp_python-*.whl")]
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as content:
            if any("ggml-cpu-haswell" in name or "ggml-cpu-armv8" in name for name in content.namelist()):
                target = tmp_path_factory.mktemp("portable")
                content.extractall(target)
                return target
    pytest.skip("dist/ has no wheelhouse for all processors: make wheelhouse")


@pytest.mark.skipif(sys.platform != "linux", reason="libraries have other names elsewhere")
def test_a_package_without_a_device_is_reported(portable: Path, tmp_path: Path) -> None:
    shutil.copytree(portable, tmp_path / "packages")
    for library in (tmp_path / "packages").rglob("libggml-*"):
        if "base" not in library.name:
            library.unlink()
    with pytest.raises(AssertionError, match=r"llama\.cpp has no device to compute with"):
        look(tmp_path, tmp_path / "packages")


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_device_files_are_loaded_only_from_the_package(portable: Path, tmp_path: Path) -> None:
    # llama.cpp by itself loads such files from the current directory, where an attacker may have put them.
    planted = tmp_path / "libggml-cpu-zen4.so"
    planted.write_bytes(next(portable.rglob("libggml-cpu-x64.so")).read_bytes())
    found = look(tmp_path, portable)
    assert found["devices"] >= 1 and found["rpc"] and found["system"]
    assert found["gpu"] <= any(portable.rglob("*ggml-vulkan*"))
    assert found["package"] == str(portable / "llama_cpp")
    assert len(found["from"]) == 1 and found["from"][0].startswith(found["package"])


@pytest.mark.slow
@pytest.mark.skipif(not LAVAPIPE.exists(), reason="needs a Vulkan driver that computes on the processor")
def test_vulkan_draws_what_the_processor_draws(
    portable: Path, base: Path, make_adapter: Callable[..., Path], tmp_path: Path
) -> None:
    if not any(portable.rglob("*ggml-vulkan*")):
        pytest.skip("the wheelhouse in dist/ has no Vulkan")
    paths = os.pathsep.join(map(str, [portable, ROOT / "edge_client", ROOT / "shared"]))
    visible = {"VK_ICD_FILENAMES": str(LAVAPIPE), "GGML_VK_VISIBLE_DEVICES": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", DRAW, str(base), str(make_adapter(base, 1)), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths, **visible},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    drawn = json.loads(ran.stdout)
    assert len(drawn["cpu"]) == len(drawn["vulkan"]) == 4
    furthest, alike = 0.0, 0
    for (ids, logprobs), (other_ids, other_logprobs) in zip(drawn["cpu"], drawn["vulkan"], strict=True):
        common = next((n for n, (one, other) in enumerate(zip(ids, other_ids, strict=True)) if one != other), len(ids))
        # Compare the log-probabilities only before the first different token: from then on, the texts differ.
        apart = np.abs(np.subtract(logprobs[:common], other_logprobs[:common]))
        furthest, alike = max(furthest, *apart.tolist(), 0.0), alike + common
    print(f"log-probabilities differ by at most {furthest:.2g}; {alike} of 96 tokens are alike")
    assert furthest < 0.02 and alike >= 72
