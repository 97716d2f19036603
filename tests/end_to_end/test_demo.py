from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = pytest.mark.timeout(600)


def processes_of(directory: Path) -> list[psutil.Process]:
    """Return processes with this directory among their arguments, and all their children."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(directory) in argument for argument in process.cmdline()):
                found += [process, *process.children(recursive=True)]
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


@pytest.mark.slow
# PEFT reads an attribute that transformers has renamed.
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
async def test_the_demo_ends_by_itself_and_reports(site: Any) -> None:
    run, report_file = site.root / "demo", site.root / "report.json"
    status, said = await site.command(
        "echo_hub.main", "demo", "--directory", run, "--steps", "16", "--seed", "5", "--json", report_file
    )
    assert status == 0, said
    for text in ("Dashboard", "Held-out accuracy", "before", "after", "Completions", "Adapter"):
        assert text in said
    report = json.loads(report_file.read_text())
    assert report["policy_versions"] == 16
    assert report["leased"] == report["trained"] + sum(report["dropped"].values())
    assert sum(report["trained_by_node"].values()) == report["trained"] == 16 * 512
    tokens = report["trained_tokens"]
    assert 2 <= tokens["p10"] <= tokens["mean"] <= tokens["longest"] <= 6
    assert all(trained > 0 for trained in report["trained_by_node"].values())
    assert set(report["backend_by_node"].values()) == {"llama_cpp", "torch"}
    assert "llama.cpp is not installed" not in said
    assert report["versions_by_transport"]["swarm"] >= 16
    assert report["versions_by_transport"]["web_seed"] == report["versions_by_transport"]["shared_memory"] == 0
    assert report["accuracy_after"] > report["accuracy_before"]
    assert (Path(report["adapter"]) / "adapter_model.safetensors").is_file()
    assert processes_of(run) == []

    exported = site.root / "exported"
    status, said = await site.command("echo_hub.main", "export", run, exported)
    assert status == 0, said
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from echo_hub.run.base_files import resolve_base

    base = AutoModelForCausalLM.from_pretrained(resolve_base("builtin:tiny"))
    model = PeftModel.from_pretrained(base, exported)
    assert any(parameter.abs().sum() > 0 for name, parameter in model.named_parameters() if "lora_B" in name)

    status, said = await site.command("echo_hub.main", "eval", run, "--problems", "512")
    assert status == 0, said
    assert f"{report['accuracy_before']:.1%}" in said
    assert f"{report['accuracy_after']:.1%}" in said


@pytest.mark.slow
async def test_ctrl_c_leaves_nothing_behind(site: Any, until: Any, operator: Any) -> None:
    run = site.root / "demo"
    demo = await site.start("echo_hub.main", "demo", "--directory", run, "--keep")
    url = (await demo.printed(r"Dashboard +(http://\S+)/"))[1]
    operator(url, run)
    await until(url, lambda view: view["trained_step"] >= 1)
    assert processes_of(run)
    status, said = await demo.end(signal.SIGINT)
    assert status == 0, said
    assert "Traceback" not in said
    assert "Stopped" in said
    assert processes_of(run) == []
