"""The policy: a frozen base model with one trainable LoRA adapter, held by PEFT.

The adapter's weights are float32 everywhere. On CUDA the base is bfloat16 and the computation runs under autocast.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from echo_hub.learner.batch import SHARED_ROW_TOKENS, MicroBatch
from echo_hub.learner.logprobs import selected_logprobs
from echo_hub.learner.settings import LearnerSettings
from echo_shared.adapter import CONFIG_FILE, PROJECTIONS, WEIGHTS_FILE
from echo_shared.draws import derive_seed
from echo_shared.errors import LearnerError

_PROCESSED_LOGITS: Final = ("final_logit_softcapping", "logits_scaling", "logit_scale")
"""Configuration keys of models whose logits are more than their output layer's."""


class Policy:
    """Made by `load`. `model` is in eval mode (there is no dropout) and ready for `echo_shared.torch_sampler`."""

    def __init__(self, model: PeftModel, *, device: torch.device, temperature: float) -> None:
        self.model = model
        self.device = device
        self.parameters: dict[str, torch.nn.Parameter] = {
            name.replace(".default.", "."): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        """The adapter's weights by their names in PEFT's files."""
        self._temperature = temperature

    @classmethod
    def load(cls, settings: LearnerSettings) -> Policy:
        """The base with a fresh adapter, which changes nothing yet: policy version 0. The same seed, the same adapter.

        Raises LearnerError when the base cannot be loaded or is of a kind that cannot be trained here.
        """
        device = _device(settings.training.device)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        try:
            base = AutoModelForCausalLM.from_pretrained(
                settings.base_dir, dtype=dtype, attn_implementation="sdpa", local_files_only=True, use_safetensors=True
            )
        except (OSError, ValueError, SafetensorError) as error:
            raise LearnerError(
                "The base model cannot be loaded.",
                got=f"{settings.base_dir}: {error}",
                do="Give model.base a causal LM in Hugging Face layout, with safetensors weights.",
            ) from error
        _check(base.config)
        lora = LoraConfig(
            r=settings.training.lora_rank,
            lora_alpha=settings.training.lora_alpha,
            target_modules=sorted(PROJECTIONS),
            lora_dropout=0.0,
            bias="none",
            task_type="CAUSAL_LM",
        )
        torch.manual_seed(derive_seed("learner", settings.seed))
        with warnings.catch_warnings():
            # PEFT reads an attribute that transformers has renamed.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            model = get_peft_model(base, lora)
        model.peft_config["default"].base_model_name_or_path = settings.base_name
        return cls(model.to(device).eval(), device=device, temperature=settings.temperature)

    @property
    def shared_row_tokens(self) -> int:
        """Up to which length rollouts may share a row: 0 for models that mix positions other than by attention."""
        layers = getattr(self.model.get_base_model().config, "layer_types", None) or ()
        return (
            SHARED_ROW_TOKENS if all(layer.endswith("attention") and "linear" not in layer for layer in layers) else 0
        )

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.device.type == "cuda")

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """The learner's log-probabilities of the batch's completion tokens, float32 nats [N], with their graph."""
        base: Any = self.model.get_base_model()
        with self.autocast():
            # The body, without the output layer: logits are only wanted where they predict a completion's token.
            output = base.base_model(
                input_ids=batch.input_ids_BT,
                position_ids=batch.position_ids_BT,
                attention_mask=batch.attention_mask(),
                use_cache=False,
            )
            hidden_NH = output.last_hidden_state.flatten(0, 1)[batch.predictors_N]
            return selected_logprobs(
                hidden_NH, base.get_output_embeddings(), batch.target_ids_N, temperature=self._temperature
            )

    def save_adapter(self, directory: Path) -> None:
        """Writes the adapter in PEFT's layout; the same weights give the same bytes."""
        weights = {name: parameter.detach().cpu() for name, parameter in self.parameters.items()}
        save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})
        config = {**self.model.peft_config["default"].to_dict(), "inference_mode": True}
        config["target_modules"] = sorted(config["target_modules"])
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def load_adapter(self, directory: Path) -> None:
        """Takes over the adapter in `directory`. Raises LearnerError unless it has exactly this policy's tensors."""
        try:
            weights = load_file(directory / WEIGHTS_FILE)
        except (OSError, SafetensorError) as error:
            raise LearnerError("An adapter cannot be read.", got=f"{directory}: {error}") from error
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        if {name: weight.shape for name, weight in weights.items()} != shapes:
            raise LearnerError(
                "An adapter does not fit the base model and LoRA settings of this run.",
                got=f"{directory}: {len(weights)} tensors, {len(shapes)} expected",
                do="Use the base model and training.lora_rank that it was trained with.",
            )
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(weights[name])

    @contextmanager
    def holding(self, directory: Path) -> Iterator[None]:
        """The adapter in `directory` in place of the policy's own, for as long as the block runs."""
        own = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        try:
            self.load_adapter(directory)
            yield
        finally:
            with torch.no_grad():
                for name, parameter in self.parameters.items():
                    parameter.copy_(own[name])


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise LearnerError(
            "PyTorch finds no CUDA device.", got=f"training.device = {name}", do="Set training.device to auto or cpu."
        )
    return torch.device(name)


def _check(config: Any) -> None:
    for key in _PROCESSED_LOGITS:
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise LearnerError(
                "This base model changes its logits after the output layer, which the learner does not do.",
                got=f"{key} in {config.model_type}",
                do="Choose another base model, such as Qwen or Llama.",
            )
