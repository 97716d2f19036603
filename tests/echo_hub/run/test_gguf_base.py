from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import load_file
from tokenizers import pre_tokenizers

from echo_hub.config.sections import HubConfig
from echo_hub.run.base_files import resolve_base
from echo_hub.run.base_model import PromptCodec
from echo_hub.run.gguf_base import gguf_in
from echo_shared.errors import ConfigError

TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
HIDDEN, HEADS, INNER, LAYERS = 32, 4, 64, 2


def write(path: Path, *, tensors_each: int = 0) -> Path:
    """Write a Llama with random weights, whose tokens are bytes, in the form of llama.cpp's converter. With
    `tensors_each`, split it into parts with this number of tensors. Return the file, or the first part.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "ĠĠ", "12"]
    writer = GGUFWriter(path, "llama", split_max_tensors=tensors_each)
    writer.add_type("model")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *[1] * (len(tokens) - 3)])
    writer.add_token_merges(["Ġ Ġ", "1 2"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    draws = np.random.default_rng(5)
    square, wide, tall = (HIDDEN, HIDDEN), (INNER, HIDDEN), (HIDDEN, INNER)
    shapes = {"token_embd": (len(tokens), HIDDEN), "output_norm": (HIDDEN,), "output": (len(tokens), HIDDEN)}
    for layer in range(LAYERS):
        parts = {**dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), square), "ffn_down": tall}
        parts |= {"ffn_gate": wide, "ffn_up": wide, "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,)}
        shapes |= {f"blk.{layer}.{name}": shape for name, shape in parts.items()}
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draws.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob("*.gguf")) if tensors_each else path


def test_a_gguf_file_is_unpacked_once_and_is_a_model_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write(tmp_path / "Mödel 1" / "tiny.gguf")
    directory = resolve_base(str(file))
    began = (directory / "model.safetensors").stat().st_ino
    codec = PromptCodec.of_run(HubConfig(), directory)
    ids = codec.encode_prompt("Explain <|im_end|> now").tolist()
    assert codec.text(ids) == "<|im_start|>user\nExplain <|im_end|> now<|im_end|>\n"
    assert (ids.count(2), codec.stop_ids, codec.context_tokens) == (1, (2,), 128)
    # The tokenizer "smollm" splits text at each digit: "12" is two tokens, and both spaces are one.
    assert [codec.text([token]) for token in codec.encode_reply("a  12")[:-1]] == ["a", "  ", "1", "2"]
    weights = load_file(directory / "model.safetensors")
    assert weights["model.layers.1.mlp.up_proj.weight"].shape == (INNER, HIDDEN)
    assert weights["model.embed_tokens.weight"].dtype == np.float32, "the file has no others"
    assert resolve_base(str(file.parent)) == directory
    assert (directory / "model.safetensors").stat().st_ino == began
    os.utime(file, (1, 1))
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ConfigError, match="cannot be the base model") as caught:
        resolve_base(str(file))
    assert str(file) in str(caught.value.got) and caught.value.do
    assert [path.name for path in directory.parent.iterdir()] == [directory.name], "nothing half done is left"


@pytest.mark.parametrize("form", ["split", "linked"])
def test_a_split_model_and_a_link_of_the_model_hubs_cache_unpack_to_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write(tmp_path / "whole" / "tiny.gguf")
    if form == "split":
        other = write(tmp_path / "other" / "tiny.gguf", tensors_each=8)
        assert len(list(other.parent.iterdir())) == 3
    else:
        other = tmp_path / "other" / "tiny.gguf"
        other.parent.mkdir()
        shutil.copyfile(file, tmp_path / "0a1b2c")
        other.symlink_to(tmp_path / "0a1b2c")
    one, two = (resolve_base(str(path)) for path in (file, other))
    assert one != two and sorted(path.name for path in one.iterdir()) == sorted(path.name for path in two.iterdir())
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_a_part_that_is_missing_is_named(tmp_path: Path) -> None:
    first = write(tmp_path / "tiny.gguf", tensors_each=8)
    missing = first.with_name(first.name.replace("00001", "00002"))
    missing.unlink()
    with pytest.raises(ConfigError, match="incomplete") as caught:
        resolve_base(str(first))
    assert missing.name in str(caught.value.got) and caught.value.do


def test_which_file_is_meant(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    assert gguf_in(model) is None and gguf_in(tmp_path / "none.gguf") is None
    (model / "a.GGUF").write_bytes(b"")
    assert gguf_in(model) == gguf_in(model / "a.GGUF") == model / "a.GGUF"
    (model / "b.gguf").write_bytes(b"")
    assert gguf_in(model / "b.gguf") == model / "b.gguf"
    with pytest.raises(ConfigError, match=r"several GGUF files") as caught:
        gguf_in(model)
    assert "a.GGUF, b.gguf" in str(caught.value.got)
    (model / "config.json").write_text("{}")
    assert gguf_in(model) is None, "it holds another model"
    with pytest.raises(ConfigError, match="base model does not exist"):
        resolve_base("none.gguf")


def test_unpacking_ends_with_its_parent_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "echo_hub.run.gguf_base", str(write(tmp_path / "tiny.gguf")), str(tmp_path / "to")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(timeout=60) == 1
    assert not (tmp_path / "to").exists()
