"""A version is exported as one GGUF file. llama.cpp's own API must load the file, encode text with it, and answer."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from echo_hub.config.sections import HubConfig, ModelConfig, RunConfig
from echo_hub.config.task_sections import TaskConfig
from echo_hub.config.training_sections import TrainingConfig
from echo_hub.lifecycle.export import export_merged
from echo_hub.lifecycle.gguf.export import PRECISIONS, export_gguf
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_shared.errors import ConfigError

llama_cpp = pytest.importorskip("llama_cpp")
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")
PROMPTS = ("12+34=", "What is 7 + 8?", "Name three colours.")


def make_run_with_version(root: Path, base: str, *, strength: float, **task: Any) -> RunDirectory:
    """Return a run whose version 3 is a random adapter of the given strength."""
    run = RunDirectory(root / "run")
    training = TrainingConfig(lora_rank=2, lora_targets="q_proj,v_proj")
    make_run(
        run,
        HubConfig(
            run=RunConfig(name="Spring sums!"), model=ModelConfig(base=base), task=TaskConfig(**task), training=training
        ),
    )
    torch.manual_seed(5)
    config = LoraConfig(r=2, target_modules=training.lora_targets.split(","), task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        plain = AutoModelForCausalLM.from_pretrained(resolve_base(base), dtype=torch.float32)
        model: Any = get_peft_model(plain, config)
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight, std=strength)
    model.save_pretrained(run.adapter(3))
    return run


def llama(file: Path) -> Any:
    return llama_cpp.Llama(str(file), n_ctx=256, n_gpu_layers=0, n_threads=1, verbose=False)


def greedy_of_transformers(directory: Path, ids: list[int], count: int) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        out = model.generate(
            torch.tensor([ids]), max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    return out[0, len(ids) :].tolist()


def greedy_of_llama(model: Any, ids: list[int], count: int) -> list[int]:
    found: list[int] = []
    for token in model.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0):
        found.append(int(token))
        if len(found) == count:
            break
    return found


def test_the_built_in_model_answers_as_the_merged_directory_does(tmp_path: Path) -> None:
    run = make_run_with_version(tmp_path, "builtin:tiny", strength=0.3)
    export_merged(run, tmp_path / "merged", policy_version=3, dtype="float32")
    done = export_gguf(run, tmp_path / "gguf", policy_version=None, precision="f32")
    assert done.version == 3 and done.file == tmp_path / "gguf" / "spring-sums-v3-f32.gguf"
    assert sorted(path.name for path in (tmp_path / "gguf").iterdir()) == ["README.md", done.file.name]
    assert any("rare texts" in note for note in done.notes), "it knows only the characters of ASCII"
    model, tokenizer = llama(done.file), AutoTokenizer.from_pretrained(tmp_path / "merged")
    for prompt in PROMPTS:
        ids = tokenizer(prompt, add_special_tokens=False).input_ids
        assert model.tokenize(prompt.encode(), add_bos=True, special=True) == ids
        assert greedy_of_llama(model, ids, 24) == greedy_of_transformers(tmp_path / "merged", ids, 24)
    said = model.create_completion("12+34=", max_tokens=12, temperature=0.0)["choices"][0]
    codec = PromptCodec.load(tmp_path / "merged")
    expected = greedy_of_transformers(tmp_path / "merged", codec.encode_prompt("12+34=").tolist(), 12)
    end = next((place for place, token in enumerate(expected) if token in codec.stop_ids), len(expected))
    assert said["text"] == codec.decode(expected[:end])
    model.close()


@pytest.mark.parametrize("precision", [one for one in PRECISIONS if one != "f32"])
def test_every_precision_loads_and_stays_close(tmp_path: Path, precision: str) -> None:
    run = make_run_with_version(tmp_path, "builtin:tiny", strength=0.3)
    export_merged(run, tmp_path / "merged", policy_version=3, dtype="float32")
    done = export_gguf(run, tmp_path / "gguf", policy_version=3, precision=precision)
    ids = PromptCodec.load(tmp_path / "merged").encode_prompt("12+34=").tolist()
    model = llama_cpp.Llama(str(done.file), n_ctx=64, n_threads=1, verbose=False, logits_all=True)
    model.eval(ids)
    found = torch.tensor(np.array(model.scores[: len(ids)])).log_softmax(-1)
    model.close()
    with torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")(torch.tensor([ids])).logits[0]
    divergence = (whole.softmax(-1) * (whole.log_softmax(-1) - found)).sum(-1).mean()
    limit = {"f16": 1e-4, "bf16": 1e-2, "q8_0": 1e-2, "q6_k": 0.1, "q5_k_m": 0.3, "q4_k_m": 0.5}[precision]
    assert 0 <= divergence + 1e-6 < limit


def test_the_modelfile_and_the_card_belong_to_the_file(tmp_path: Path) -> None:
    run = make_run_with_version(tmp_path, "builtin:tiny", strength=0.3, prompt_suffix="=")
    done = export_gguf(run, tmp_path / "gguf", policy_version=3, precision="q8_0", with_ollama=True)
    assert done.ollama_name == "spring-sums:v3"
    assert f"FROM ./{done.file.name}\n" in (tmp_path / "gguf" / "Modelfile").read_text()
    card = (tmp_path / "gguf" / "README.md").read_text()
    assert "library_name: gguf" in card and f"llama-cli -m {done.file.name} -no-cnv" in card
    assert "ollama create spring-sums:v3 -f Modelfile" in card and done.notes[0] in card


def test_what_cannot_be_exported_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    run = make_run_with_version(tmp_path, "builtin:tiny", strength=0.3)
    with pytest.raises(ConfigError, match=r"(?s)no such precision.*q9.*q4_k_m"):
        export_gguf(run, tmp_path / "gguf", policy_version=3, precision="q9")
    with pytest.raises(ConfigError, match="asked for 2"):
        export_gguf(run, tmp_path / "gguf", policy_version=2, precision="q8_0")
    small = RunDirectory(tmp_path / "small")
    make_run(small, HubConfig(model=ModelConfig(base="builtin:small")))
    shutil.copytree(run.adapter(3), small.adapter(1))
    with pytest.raises(ConfigError, match=r"(?s)everyday text with other tokens.*texts differ"):
        export_gguf(small, tmp_path / "gguf", policy_version=1, precision="q8_0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "small"]


@pytest.mark.slow
def test_a_real_model_talks_with_its_own_template(real_model: Path, tmp_path: Path) -> None:
    run = make_run_with_version(tmp_path, str(real_model), strength=0.02)
    export_merged(run, tmp_path / "merged", policy_version=3, dtype="float32")
    done = export_gguf(run, tmp_path / "gguf", policy_version=3, precision="f32", with_ollama=True)
    assert done.notes == (), "every text is read with the same tokens"
    codec = PromptCodec.load(tmp_path / "merged")
    model = llama(done.file)
    assert model.metadata["tokenizer.ggml.pre"] == "smollm"
    for prompt in PROMPTS:
        ids = codec.encode_prompt(prompt).tolist()
        expected = greedy_of_transformers(tmp_path / "merged", ids, 24)
        end = next((place for place, token in enumerate(expected) if token in codec.stop_ids), len(expected))
        said = model.create_chat_completion([{"role": "user", "content": prompt}], max_tokens=24, temperature=0.0)
        assert said["usage"]["prompt_tokens"] == len(ids)
        assert said["choices"][0]["message"]["content"] == codec.decode(expected[:end])
    model.close()
    template = (tmp_path / "gguf" / "Modelfile").read_text()
    assert (
        '"system" }}<|im_start|>system\n{{ .Content }}<|im_end|>' in template
        and "You are a helpful AI assistant" in template
    )


@pytest.mark.slow
def test_a_base_from_a_gguf_file_gives_its_tokenizer_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    from benchmarks.harness.real_model import lacks
    from echo_hub.run.packaged_base import SMOLLM2, gguf_file

    if lacks():
        pytest.skip(f"lacks {lacks()}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    given = gguf_file(SMOLLM2)
    assert given is not None
    run = make_run_with_version(tmp_path, str(given), strength=0.02)
    done = export_gguf(run, tmp_path / "gguf", policy_version=3, precision="q8_0")
    before, after = gguf.GGUFReader(given), gguf.GGUFReader(done.file)
    for name, field in before.fields.items():
        if name.startswith("tokenizer."):
            assert after.fields[name].contents() == field.contents(), name
    assert done.notes == (), "the hub's tokenizer splits all texts as llama.cpp does"
