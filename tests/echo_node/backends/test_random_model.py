"""The random model for speed measurements loads in every engine and has the promised size."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from echo_node.backends.random_model import make_random_model


def test_the_random_model_has_the_promised_size(tmp_path: Path) -> None:
    directory = make_random_model(tmp_path / "model")
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
    wanted = {name: tuple(tensor.shape) for name, tensor in model.named_parameters()}
    with safe_open(directory / "model.safetensors", "numpy") as file:
        found = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        embeddings = file.get_tensor("model.embed_tokens.weight")
    assert found == wanted
    assert 60e6 < sum(math.prod(shape) for shape in found.values()) < 100e6
    assert embeddings.dtype == np.float16 and 0.019 < float(embeddings.astype(np.float32).std()) < 0.021
    assert json.loads((directory / "config.json").read_text())["max_position_embeddings"] >= 1_024
