"""Merge a LoRA adapter into its base model, so that programs without PEFT can load the result.

Adapted weights are rounded to 16 bits stochastically: up or down with the probability that keeps the mean. The weights
of a bfloat16 base are bfloat16 numbers, and most changes by an adapter are smaller than half the distance to the next
bfloat16 number. So rounding to nearest would return the base's weight. With stochastic rounding each output, a sum over
hundreds of weights, keeps the adapter's change.
"""

from __future__ import annotations

import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

from echo_hub.run.template_files import TEMPLATES_FOLDER
from echo_shared.delta.adapter import load_adapter
from echo_shared.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES: Final[tuple[Dtype, ...]] = get_args(Dtype)
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json")
_NOT_COPIED: Final = ("README.md", "adapter_config.json")
"""Files of the base model that are not copied, because they describe the base model's weights, not the merged ones."""


def merge(base_dir: Path, adapter_dir: Path, into: Path, *, dtype: Dtype) -> None:
    """Write the merged model to the directory `into`, in Hugging Face layout, with all other files of the base:
    tokenizer, chat templates, generation settings, licence.

    The sum is computed in float32 and then rounded to `dtype`, in the same way every time; "auto" is the dtype of the
    base. Needs the memory of the model in float32. Raises ConfigError if the base or the adapter cannot be loaded.
    """
    # Import here: torch takes seconds to load.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, but merging does not use it.
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # PEFT reads an attribute that transformers has renamed, which would print a warning.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
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
    target = getattr(torch, _dtype_of(base_dir) if dtype == "auto" else dtype)
    if target != torch.float32:
        generator = torch.Generator().manual_seed(0)
        for module in load_adapter(adapter_dir).modules:
            weight = merged.get_submodule(module.path).weight
            weight.data = stochastically_rounded(weight.data, target, generator)
    merged.to(target).save_pretrained(into)
    for path in base_dir.iterdir():
        is_kept = path.is_file() and not path.name.endswith(_WEIGHTS) and path.name not in _NOT_COPIED
        if is_kept and not (into / path.name).exists():
            shutil.copyfile(path, into / path.name)
    if (base_dir / TEMPLATES_FOLDER).is_dir():
        shutil.copytree(base_dir / TEMPLATES_FOLDER, into / TEMPLATES_FOLDER, dirs_exist_ok=True)


def stochastically_rounded(values: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return float32 `values` rounded to one of the two neighbours in `dtype`, the nearer one with the higher
    probability, so that the mean over all outcomes is the value. Values that `dtype` can represent stay unchanged.
    """
    import torch

    nearest = values.to(dtype)
    error = values - nearest.float()
    other = torch.nextafter(nearest, torch.full_like(nearest, torch.inf).copysign(error.to(dtype)))
    distance = (other.float() - nearest.float()).abs()
    draws = torch.rand(values.shape, generator=generator)
    return torch.where(draws * distance < error.abs(), other, nearest)


def _dtype_of(base_dir: Path) -> str:
    """Return the dtype of the base's weights according to its configuration; float32 if the configuration names
    none."""
    config = json.loads((base_dir / "config.json").read_text(encoding="utf-8"))
    said = config.get("dtype") or config.get("torch_dtype")
    return said if said in DTYPES and said != "auto" else "float32"
