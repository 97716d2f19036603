"""Precisions of GGUF model files that this package can write."""

from __future__ import annotations

from typing import Final

import gguf

FILE_TYPES: Final = {
    "f32": (gguf.LlamaFileType.ALL_F32, gguf.GGMLQuantizationType.F32),
    "f16": (gguf.LlamaFileType.MOSTLY_F16, gguf.GGMLQuantizationType.F16),
    "bf16": (gguf.LlamaFileType.MOSTLY_BF16, gguf.GGMLQuantizationType.BF16),
    "q8_0": (gguf.LlamaFileType.MOSTLY_Q8_0, gguf.GGMLQuantizationType.Q8_0),
}
"""Precisions that this package writes itself, each with GGUF's type of the file and of its matrices."""
K_QUANTS: Final = {
    "q3_k_m": gguf.LlamaFileType.MOSTLY_Q3_K_M,
    "q4_k_m": gguf.LlamaFileType.MOSTLY_Q4_K_M,
    "q5_k_m": gguf.LlamaFileType.MOSTLY_Q5_K_M,
    "q6_k": gguf.LlamaFileType.MOSTLY_Q6_K,
}
"""Precisions to which llama.cpp itself converts a 16-bit file (`quantising`)."""
PRECISIONS: Final = (*FILE_TYPES, *K_QUANTS)
