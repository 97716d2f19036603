"""The demo with a real language model, SmolLM2-135M-Instruct, in a few small steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.test_demo import processes_of

FEW: dict[str, str] = {
    "ECHO_HUB_TRAINING__GROUP_SIZE": "8",
    "ECHO_HUB_TRAINING__GROUPS_PER_STEP": "4",
    "ECHO_HUB_EVALUATION__PROBLEMS": "8",
}


def beginning(file: Path) -> bytes:
    return file.read_bytes()[:4]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("real_model")  # Skips the test if the package is missing.
# PEFT reads an attribute that transformers has renamed.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
async def test_a_language_model_is_trained_and_no_node_is_quarantined(
    site: Any, books: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llama_cpp")
    for name, value in {**FEW, "XDG_CACHE_HOME": str(tmp_path / "cache")}.items():
        monkeypatch.setenv(name, value)
    run, report_file = site.root / "demo", site.root / "report.json"
    demo = await site.start(
        "echo_hub.main", "demo", "--base", "smollm2", "--steps", "3", "--directory", run, "--json", report_file
    )
    status, said = await demo.ended(within_s=840)
    assert status == 0, said
    assert "Held-out accuracy" in said and "To talk to it" in said
    report = json.loads(report_file.read_text())
    assert report["policy_versions"] == 3
    assert sum(report["trained_by_node"].values()) == report["trained"] == 3 * 32
    assert report["leased"] == report["trained"] + sum(report["dropped"].values())
    assert set(report["backend_by_node"].values()) == {"llama_cpp", "torch"}
    assert beginning(Path(report["gguf"])) == b"GGUF"
    database = books(run)
    nodes = database.execute("SELECT state, num_checked, num_failed FROM trust").fetchall()
    assert sum(checked for _, checked, _ in nodes) >= 3 * 32, "all rollouts of new nodes are checked"
    assert [(state, failed) for state, _, failed in nodes if state == "quarantined" or failed] == []
    losses = [json.loads(metrics) for (metrics,) in database.execute("SELECT metrics FROM steps ORDER BY step")]
    assert len(losses) == 3 and any(metrics["updated"] for metrics in losses), "no step changed the policy"
    # Only the first step is checked: later steps also train on rollouts of older versions, for which the mismatch is
    # larger.
    assert losses[0]["mismatch_kl"] < 1e-6, "float32 engines and the learner compute the same"
    assert processes_of(run) == []
