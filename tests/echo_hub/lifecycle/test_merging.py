"""A real adapter is merged into its base. The merged model in plain transformers must compute the same as base and
adapter together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo_hub.config.sections import HubConfig, ModelConfig
from echo_hub.lifecycle.export import export_merged
from echo_hub.lifecycle.merging import Dtype, merge, stochastically_rounded
from echo_hub.run.base_files import resolve_base
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.run.template_files import TEMPLATES_FOLDER
from echo_shared.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
IDS = torch.tensor([[3, 4, 5, 6]])


@pytest.fixture
def base(tmp_path: Path) -> Path:
    directory = tmp_path / "base"
    shutil.copytree(resolve_base("builtin:tiny"), directory)
    (directory / "LICENSE").write_text("free")
    (directory / "README.md").write_text("the base's own card")
    (directory / TEMPLATES_FOLDER).mkdir()
    (directory / TEMPLATES_FOLDER / "tool_use.jinja").write_text("with tools")
    return directory


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    torch.manual_seed(5)
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(IDS).logits.float()


def together(base: Path, adapter: Path) -> torch.Tensor:
    return logits(PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter))


def test_the_merged_model_computes_what_base_and_adapter_do(base: Path, adapter: Path, tmp_path: Path) -> None:
    merge(base, adapter, tmp_path / "out", dtype="float32")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.dtype == torch.float32
    torch.testing.assert_close(logits(merged), together(base, adapter), atol=1e-5, rtol=1e-5)
    alone = logits(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32))
    assert (logits(merged) - alone).abs().max() > 0.01, "the adapter changes something"


@pytest.mark.parametrize(("asked", "got"), [("auto", "bfloat16"), ("float16", "float16")])
def test_the_weights_have_the_dtype_of_the_base_or_the_one_given(
    base: Path, adapter: Path, tmp_path: Path, asked: Dtype, got: str
) -> None:
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    merge(base, adapter, tmp_path / "out", dtype=asked)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert merged.dtype == getattr(torch, got)
    torch.testing.assert_close(logits(merged), together(base, adapter), atol=0.1, rtol=0.1)


@torch.no_grad()
def test_small_changes_survive_the_rounding_of_a_merge(base: Path, adapter: Path, tmp_path: Path) -> None:
    rounded = AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    rounded.save_pretrained(base)
    torch.manual_seed(6)
    config = LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=False)
    small = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), config)
    for name, parameter in small.named_parameters():
        if "lora_B" in name:
            parameter.data.mul_(1e-4)  # Far below half the distance of two numbers in bfloat16.
    small.save_pretrained(tmp_path / "small")
    for number in range(2):
        merge(base, tmp_path / "small", tmp_path / f"out{number}", dtype="bfloat16")
    layer = "model.layers.0.mlp.up_proj"
    before, after, again = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).get_submodule(layer).weight
        for path in (base, tmp_path / "out0", tmp_path / "out1")
    )
    assert torch.equal(after, again)
    change = (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), tmp_path / "small")
        .get_submodule(f"base_model.model.{layer}")
        .get_delta_weight("default")
    )
    nearest = (before + change).bfloat16().float()
    kept, kept_by_nearest = (float(((it - before) * change).sum() / (change * change).sum()) for it in (after, nearest))
    assert kept == pytest.approx(1.0, abs=0.25) and kept_by_nearest < 0.5, "rounding to nearest loses most of it"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_rounding_keeps_the_mean_and_all_exact_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    exact = torch.tensor([0.0, 1.0, -1.5, 2.0**-14, 100.0])
    assert torch.equal(stochastically_rounded(exact, dtype, generator).float(), exact)
    values = torch.tensor([1.001, -0.3333, 1e-3, 77.7])
    drawn = stochastically_rounded(values.repeat(20_000, 1), dtype, generator)
    assert drawn.dtype == dtype and all(len(column.unique()) == 2 for column in drawn.T)
    torch.testing.assert_close(drawn.double().mean(dim=0).float(), values, rtol=1e-4, atol=0.0)


def test_all_that_belongs_to_the_model_comes_along(base: Path, adapter: Path, tmp_path: Path) -> None:
    merge(base, adapter, tmp_path / "out", dtype="auto")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {path.name for path in base.iterdir()} - {"README.md"} <= names | {"model.safetensors"}
    assert (tmp_path / "out" / TEMPLATES_FOLDER / "tool_use.jinja").read_text() == "with tools"
    assert "README.md" not in names and not any(name.startswith("adapter") for name in names)
    text = "1 + 2 ="
    assert AutoTokenizer.from_pretrained(tmp_path / "out")(text) == AutoTokenizer.from_pretrained(base)(text)


def test_an_adapter_of_another_base_is_refused(base: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "adapter_config.json").write_text('{"peft_type": "LORA", "target_modules": ["nothing"]}')
    with pytest.raises(ConfigError, match="cannot be merged"):
        merge(base, tmp_path / "other", tmp_path / "out", dtype="auto")


def test_a_run_s_version_is_exported_whole_with_a_card(base: Path, adapter: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    make_run(run, HubConfig(model=ModelConfig(base=str(base))))
    shutil.copytree(adapter, run.adapter(3))
    assert export_merged(run, tmp_path / "whole", policy_version=None) == 3
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    torch.testing.assert_close(logits(merged), together(base, adapter), atol=1e-4, rtol=1e-4)
    card = (tmp_path / "whole" / "README.md").read_text()
    assert "library_name: transformers" in card and "merged LoRA adapter" in card and "peft" not in card
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".whole")], "nothing is left over"
    with pytest.raises(ConfigError, match="exists already"):
        export_merged(run, tmp_path / "whole", policy_version=3)
