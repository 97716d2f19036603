"""Merge a LoRA adapter into its base model, so that programs without PEFT can load the result."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Final, Literal, get_args

from echo_shared.errors import ConfigError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: Final[tuple[Dtype, ...]] = get_args(Dtype)
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_NOT_COPIED: Final = ("README.md", "adapter_config.json")
"""Texts about other weights than the merged ones."""


def merge(base_dir: Path, adapter_dir: Path, into: Path, *, dtype: Dtype) -> None:
    """Write the merged model to the directory `into`, in Hugging Face layout, with all other files of the base:
    tokenizer, chat template, generation settings, licence.

    The sum is computed in float32 and then rounded to `dtype`; "auto" is the dtype of the base. Needs the memory of the
    model in float32. Raises ConfigError if the base or the adapter cannot be loaded.
    """
    # Import late: torch takes seconds to load.
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    try:
        base: Any = AutoModelForCausalLM.from_pretrained(
            base_dir, dtype=torch.float32, local_files_only=True, use_safetensors=True
        )
        merged = PeftModel.from_pretrained(base, str(adapter_dir)).merge_and_unload(safe_merge=True)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            "The adapter cannot be merged into the base model.",
            got=f"{base_dir} and {adapter_dir}: {error}",
            do="Export the adapter itself, without --merged.",
        ) from error
    merged.to(getattr(torch, _dtype_of(base_dir) if dtype == "auto" else dtype)).save_pretrained(into)
    for path in base_dir.iterdir():
        is_kept = path.is_file() and not path.name.endswith(_WEIGHTS) and path.name not in _NOT_COPIED
        if is_kept and not (into / path.name).exists():
            shutil.copyfile(path, into / path.name)


def _dtype_of(base_dir: Path) -> str:
    """Return the dtype of the base's weights, by its configuration; float32 if the configuration does not say."""
    config = json.loads((base_dir / "config.json").read_text(encoding="utf-8"))
    said = config.get("dtype") or config.get("torch_dtype")
    return said if said in DTYPES and said != "auto" else "float32"
