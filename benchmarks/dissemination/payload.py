"""The payload: an adapter in PEFT's layout with random weights, which cannot be compressed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Final

import numpy as np

CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
TENSORS: Final = 8
_EXPONENTS: Final = 0x7F80
"""The least bit pattern of bfloat16, without the sign, that is no finite number."""


def write_adapter(directory: Path, size_bytes: int, seed: int) -> None:
    """Write an adapter of uniformly random finite bfloat16 numbers."""
    import torch  # Nodes only need `digest_of`.
    from safetensors.torch import save_file

    rng = np.random.default_rng(seed)
    weights = {}
    for number in range(TENSORS):
        rank = 16
        bits = rng.integers(0, _EXPONENTS, (rank, size_bytes // (2 * rank * TENSORS)), np.int16)
        signs = rng.integers(0, 2, bits.shape, np.int16) << 15
        name = f"base_model.model.model.layers.{number}.self_attn.q_proj.lora_A.weight"
        weights[name] = torch.from_numpy(bits | signs).view(torch.bfloat16)
    directory.mkdir(parents=True)
    save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    (directory / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 16, "lora_alpha": 32}))


def digest_of(adapter: Path) -> str:
    """Hash the names and contents of all files. Blocks."""
    found = hashlib.sha256()
    for path in sorted(adapter.iterdir()):
        found.update(path.name.encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()
