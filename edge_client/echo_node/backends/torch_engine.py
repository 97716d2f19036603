"""transformers and PyTorch as a sampling engine: the one for CUDA, and the fallback where llama.cpp is not installed.

Rollouts are drawn in waves of up to `width`. The adapter stays unmerged; a new version is copied into the tensors that
hold the old one, its scaling folded into B, which is why PEFT's own scaling is kept at 1.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import psutil
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from echo_node.backends.base import EngineEvent, EngineSettings, GroupFailed, check_request
from echo_shared.adapter import Adapter, load_adapter
from echo_shared.errors import BackendError
from echo_shared.sampling import GroupRequest
from echo_shared.torch_sampler import sample_groups

DEFAULT_WIDTH: Final = 256
_DTYPES: Final = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_F32_MODEL_BYTES: Final = 256 * 2**20
"""A model that is smaller than this in float32 runs in float32, exactly."""


class TorchEngine:
    """See `base.Engine`."""

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        if settings.threads:
            torch.set_num_threads(settings.threads)
        try:
            self._device = torch.device(settings.device)
            base: Any = AutoModelForCausalLM.from_pretrained(
                base_dir,
                dtype=_dtype(base_dir, settings.precision, self._device),
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
            )
            self._base: Any = base.to(self._device).eval().requires_grad_(False)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise BackendError("PyTorch could not load the base model.", got=f"{base_dir}: {error}") from error
        self._peft: PeftModel | None = None
        self._uses_adapter = False
        config = self._base.config
        self._max_positions = int(config.max_position_embeddings)
        self._vocab_size = int(config.vocab_size)
        self._width = settings.width or DEFAULT_WIDTH
        self._max_cells = max(1, (settings.kv_cache_bytes or self._spare_bytes()) // self._kv_bytes_per_token())
        self._held: GroupRequest | None = None
        self._cancelled: set[int] = set()
        return self._width

    def _spare_bytes(self) -> int:
        if self._device.type == "cuda":
            return int(torch.cuda.mem_get_info(self._device)[0]) // 2
        return int(psutil.virtual_memory().total) // 4

    def _kv_bytes_per_token(self) -> int:
        config = self._base.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return int(2 * config.num_hidden_layers * config.num_key_value_heads * head_dim * self._base.dtype.itemsize)

    def set_policy(self, version: int, adapter_dir: Path | None) -> None:
        if adapter_dir is not None:
            adapter = load_adapter(adapter_dir)
            if self._peft is None or not self._copy(self._peft, adapter):
                self._wrap(adapter)
        self._uses_adapter = adapter_dir is not None
        if self._peft is not None:
            tuner: Any = self._peft.base_model
            tuner.enable_adapter_layers() if self._uses_adapter else tuner.disable_adapter_layers()

    def _wrap(self, adapter: Adapter) -> None:
        """Gives the model LoRA layers where, and as wide as, `adapter` has them."""
        if self._peft is not None:
            self._base = self._peft.unload()
            self._peft = None
            self._uses_adapter = False
        paths = [module.path for module in adapter.modules]
        known = dict(self._base.named_modules())
        for module in adapter.modules:
            layer = known.get(module.path)
            if not isinstance(layer, torch.nn.Linear) or layer.weight.shape != (len(module.b), module.a.shape[1]):
                raise BackendError("An adapter changes a layer that the base model does not have.", got=module.path)
        config = LoraConfig(r=adapter.max_rank, lora_alpha=adapter.max_rank, target_modules=paths, bias="none")
        with warnings.catch_warnings():
            # PEFT reads an attribute that transformers has renamed.
            warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
            self._peft = get_peft_model(self._base, config).eval().requires_grad_(False)
        copied = self._copy(self._peft, adapter)
        assert copied

    def _copy(self, model: PeftModel, adapter: Adapter) -> bool:
        """Copies `adapter` into the model's LoRA tensors; False, with nothing changed, if they are not made for it."""
        parameters = {name: parameter for name, parameter in model.named_parameters() if ".lora_" in name}
        if len(parameters) != 2 * len(adapter.modules):
            return False
        pairs = []
        for module in adapter.modules:
            a = parameters.get(f"base_model.model.{module.path}.lora_A.default.weight")
            b = parameters.get(f"base_model.model.{module.path}.lora_B.default.weight")
            if a is None or b is None:
                return False
            if a.shape[1] != module.a.shape[1] or len(b) != len(module.b) or len(a) < len(module.a):
                return False
            pairs.append((a, b, module))
        with torch.no_grad():  # PEFT's enable_adapter_layers makes them require a gradient again.
            for a, b, module in pairs:
                rank = len(module.a)
                a.zero_()[:rank].copy_(torch.tensor(module.a))
                b.zero_()[:, :rank].copy_(torch.tensor(module.b))
        return True

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        self._held = None
        while True:
            self._cancelled.clear()
            failed: list[EngineEvent] = []
            wave = self._fill_wave(groups, failed)
            if failed:
                yield failed
            if not wave and not failed:
                return
            try:
                for rollout in sample_groups(self._peft if self._uses_adapter else self._base, wave):
                    if rollout.lease_id not in self._cancelled:
                        yield [rollout]
            except torch.OutOfMemoryError as error:
                raise BackendError(
                    "The device has too little memory.", got=str(error), do="Lower the node's width or kv_cache_bytes."
                ) from error

    def _fill_wave(self, groups: Iterator[GroupRequest], failed: list[EngineEvent]) -> list[GroupRequest]:
        """Groups for one wave, the last one perhaps in part: the rest is held for the next."""
        wave: list[GroupRequest] = []
        rows, cells = self._width, self._max_cells
        while rows > 0:
            request, self._held = self._held or next(groups, None), None
            if request is None:
                break
            try:
                check_request(request, vocab_size=self._vocab_size, max_positions=self._max_positions)
            except BackendError as error:
                failed.append(GroupFailed.of(request.lease_id, error))
                continue
            length = len(request.prompt_ids) + request.max_tokens
            # A wave of one is always tried: whether it fits is then for the device to say.
            count = min(rows, len(request.indices), cells // length if wave else max(1, cells // length))
            wave += [dataclasses.replace(request, indices=request.indices[:count])] if count else []
            rows, cells = rows - count, cells - count * length
            if count < len(request.indices):
                self._held = dataclasses.replace(request, indices=request.indices[count:])
                break
        return wave

    def cancel(self, lease_id: int) -> None:
        # A wave's rows cannot leave it from outside: they are drawn to their end, and not reported.
        self._cancelled.add(lease_id)
        if self._held is not None and self._held.lease_id == lease_id:
            self._held = None

    def close(self) -> None:
        self._peft = self._base = None


def _dtype(base_dir: Path, precision: str, device: torch.device) -> torch.dtype:
    """Exact where that is cheap, else 16 bits."""
    if precision in _DTYPES:
        return _DTYPES[precision]
    if precision != "auto":
        raise BackendError(
            "PyTorch does not have this precision here.", got=precision, do="Use auto, f32, f16 or bf16."
        )
    stored_bytes = sum(file.stat().st_size for file in base_dir.glob("*.safetensors"))
    if 2 * stored_bytes <= _F32_MODEL_BYTES:
        return torch.float32
    has_bf16 = device.type != "cuda" or torch.cuda.is_bf16_supported()
    return torch.bfloat16 if has_bf16 else torch.float16
