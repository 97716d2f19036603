"""A real hub offers a quantised GGUF file of its base model: a node with llama.cpp samples with this file, a node with
PyTorch gets the weights, and the verifier finds both honest.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from echo_hub.run.base_files import resolve_base
from tests.gguf_files import write_gguf

pytestmark = pytest.mark.timeout(600)

RUN: dict[str, dict[str, object]] = {
    "training": {"steps": 10_000, "groups_per_step": 16, "group_size": 4, "max_staleness": 8},
    "trust": {"verifier": "process", "first_checked": 16},
    "evaluation": {"problems": 4},
}
OF_ONE_KIND = """
    SELECT rollouts.checked, count(*) FROM rollouts JOIN nodes USING (node_id) WHERE nodes.name = ? GROUP BY 1
"""


@pytest.mark.parametrize("kind", ["q8_0", pytest.param("q4_0", marks=pytest.mark.slow)])
async def test_nodes_draw_with_the_offered_file_and_are_verified(
    site: Any, until: Any, books: Callable[[Path], sqlite3.Connection], kind: str
) -> None:
    file = write_gguf(resolve_base("builtin:tiny"), site.root / "files" / f"tiny-{kind}.gguf", kind, tensors_each=20)
    run = await site.make_run("run", "--mode", "async", model={"gguf": str(file)}, **RUN)
    hub, url = await site.hub(run)
    for name, backend in (("llama", "llama_cpp"), ("torch", "torch")):
        await site.node(url, name, backend=backend)

    def has_worked(view: dict[str, Any]) -> bool:
        checks = view["trust"]["checks"]
        return bool(view["trained_step"] >= 1 and len(checks) == 2 and min(checks.values()) >= 16)

    trust = (await until(url, has_worked))["trust"]
    of_llama, of_torch = sorted(trust["checks"])
    assert of_llama.startswith(f"llama_cpp/{kind}@") and of_torch == "torch/f32/cpu"
    assert sum(trust["failed_checks"].values()) == trust["quarantined"] == 0
    assert trust["suspended"] == trust["coarser"] == []
    store = books(run)
    for name in ("llama", "torch"):
        checked = dict(store.execute(OF_ONE_KIND, (name,)).fetchall())
        assert checked.get("passed", 0) >= 8 and "failed" not in checked
    here = {name: _weights_of(site.root / name) for name in ("llama", "torch")}
    assert here["llama"] == {part.name for part in file.parent.glob("*.gguf")}
    assert here["torch"] == {"model.safetensors"}
    status, said = await hub.end()
    assert status == 0, said


def _weights_of(data_dir: Path) -> set[str]:
    """Return the names of the files of the base model in a node's data directory, encrypted ones included."""
    found = [*data_dir.rglob("*.gguf*"), *data_dir.rglob("*.safetensors*")]
    return {path.name for path in found if not path.name.startswith("adapter")}
