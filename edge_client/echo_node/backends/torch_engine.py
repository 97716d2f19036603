"""transformers and PyTorch as a sampling engine: for CUDA, and a fallback for machines without llama.cpp.

`echo_shared.sampling.torch_sampler` does the sampling, as in the hub's learner. The adapter stays separate from the
weights: a policy is a pair of small tensors for each layer. `prepare` copies them to the device, so that `set_policy`
only assigns them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import psutil
import torch
import transformers.modeling_layers  # noqa: F401 - What every model loads: here, with the other libraries.
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from echo_node.backends.base import (
    OUT_OF_MEMORY,
    EngineEvent,
    EngineSettings,
    GroupFailed,
    PreparedPolicy,
    check_ids,
    check_request,
)
from echo_node.backends.scoring import joined, pieces
from echo_node.backends.threads import Threads
from echo_node.backends.torch_linear import SamplerLinear, Update, replace_linears
from echo_shared.delta.adapter import load_adapter
from echo_shared.delta.base_weights import weights_of
from echo_shared.errors import BackendError
from echo_shared.process.out_of_memory import ran_out
from echo_shared.sampling import torch_draws
from echo_shared.sampling.interface import DrawnPart, FinishedRollout, GroupRequest
from echo_shared.sampling.prefix_cache import KeptKeys
from echo_shared.sampling.scoring import Intervals
from echo_shared.sampling.torch_cache import cache_argument, cache_of, row_bytes, spare_bytes
from echo_shared.sampling.torch_precision import multiplies
from echo_shared.sampling.torch_prefix_cache import TorchPrefixCache
from echo_shared.sampling.torch_routes import Routers
from echo_shared.sampling.torch_sampler import Batch

DEFAULT_WIDTH: Final = 256
_PREFILL_TOKENS: Final = 2_048
"""Maximum tokens of a scored completion in one forward pass."""
_DTYPES: Final = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_SPARE_PART: Final = 16
"""If less than 1/_SPARE_PART of a GPU's memory is free, kept keys and values are dropped."""
_F32_MODEL_BYTES: Final = 256 * 2**20
"""Models whose float32 weights take fewer bytes run in float32, so that they compute exactly."""


class TorchPolicy:
    """An adapter as tensors on the device, in the model's precision."""

    def __init__(self, updates: Mapping[str, Update]) -> None:
        self.updates = updates

    def free(self) -> None:
        self.updates = {}


class TorchEngine:
    """An engine that samples with PyTorch. `base.Engine` describes its methods."""

    scores = True
    converted: Path | None = None

    def __init__(self) -> None:
        self._prefixes = TorchPrefixCache(0, cuts=True)

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        weights_of(base_dir)
        self._width = settings.width or DEFAULT_WIDTH
        try:
            self._device = _device(settings.device)
            self._threads = Threads(settings.threads or torch.get_num_threads(), fixed=self._device.type != "cpu")
            with self._threads.begun(), _memory_errors():
                dtype = _dtype(base_dir, settings.precision, self._device)
                self.precision = next(name for name, known in _DTYPES.items() if known is dtype)
                base: Any = AutoModelForCausalLM.from_pretrained(
                    base_dir,
                    dtype=dtype,
                    local_files_only=True,
                    trust_remote_code=False,
                    use_safetensors=True,
                )
                self._model: Any = base.to(self._device).eval().requires_grad_(False)
                self._layers: Mapping[str, SamplerLinear] = replace_linears(self._model, rows=self._width)
                self._row = row_bytes(self._model)
                self._routers = Routers.of(self._model)
            torch.set_num_threads(self._threads.count)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            raise BackendError("PyTorch could not load the base model.", got=f"{base_dir}: {error}") from error
        config = self._model.config.get_text_config(decoder=True)
        self._max_positions = int(config.max_position_embeddings)
        self._vocab_size = int(config.vocab_size)
        self._max_cells = max(1, (settings.kv_cache_bytes or spare_bytes(self._device)) // self._row.per_token)
        self._prefixes = TorchPrefixCache(int(settings.kept_keys_share * self._max_cells), cuts=True)
        self._batch: Batch | None = None
        self._idle: Batch | None = None
        """On CUDA, the emptied batch of the last `sample`: the next one uses its memory and its captured steps (CUDA
        graphs).
        """
        return self._width

    def prepare(self, adapter_dir: Path) -> TorchPolicy:
        updates: dict[str, Update] = {}
        with _memory_errors():
            for module in load_adapter(adapter_dir).modules:
                layer = self._layers.get(module.path)
                if layer is None or layer.shape != (len(module.b), module.a.shape[1]):
                    raise BackendError(
                        "An adapter changes a layer that the base model does not have.",
                        got=f"{module.path} of {len(module.b)} x {module.a.shape[1]}",
                        do="Use the base model that the adapter was trained on.",
                    )
                updates[module.path] = (self._on_device(module.a), self._on_device(module.b))
        return TorchPolicy(updates)

    def _on_device(self, values: Any) -> torch.Tensor:
        return torch.tensor(values, dtype=self._model.dtype, device=self._device)

    def set_policy(self, policy: PreparedPolicy | None) -> None:
        assert policy is None or isinstance(policy, TorchPolicy)
        updates = policy.updates if policy is not None else {}
        in_place = self._device.type == "cuda"
        kept = [layer.set_update(updates.get(path), in_place=in_place) for path, layer in self._layers.items()]
        if self._idle is not None and not all(kept):
            self._idle.forget_steps()

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        checked = _Checked(groups, vocab_size=self._vocab_size, max_positions=self._max_positions)
        batch = self._batch = self._idle or Batch(
            self._model,
            width=self._width,
            max_cells=self._max_cells,
            state_cells=self._row.state_tokens,
            prefixes=self._prefixes if self._prefixes.max_tokens else None,
            routers=self._routers,
        )
        self._idle = None
        try:
            with _memory_errors():
                for finished in self._timed(batch.sample(checked)):
                    if finished and self._is_short_of_memory:
                        self._prefixes.clear()
                    yield [*checked.take_failed(), *finished]
            if failed := checked.take_failed():
                yield [*failed]
            self._idle = batch if self._device.type == "cuda" else None
        finally:
            if self._batch is batch:
                self._batch = None

    def _timed(self, steps: Iterator[list[FinishedRollout]]) -> Iterator[list[FinishedRollout]]:
        """Yield the steps, and adjust the number of threads after each step."""
        finished: list[FinishedRollout] | None = []
        while finished is not None:
            with self._threads.step():
                finished = next(steps, None)
            if self._threads.count != torch.get_num_threads():
                torch.set_num_threads(self._threads.count)
            if finished is not None:
                yield finished

    def cancel(self, lease_id: int) -> None:
        if self._batch is not None:
            self._batch.cancel(lease_id)

    def news(self) -> list[DrawnPart]:
        return [] if self._batch is None else self._batch.news()

    def score(self, ids: NDArray[np.int32], first: int, temperature: float) -> Intervals:
        check_ids(ids, vocab_size=self._vocab_size, max_positions=self._max_positions)
        parts: list[Intervals] = []
        cache = None
        with _memory_errors(), torch.inference_mode():
            fed = torch.from_numpy(ids.astype(np.int64)).to(self._device)[None]
            for begin, end, wanted in pieces(len(ids), first, vocab_size=self._vocab_size, most=_PREFILL_TOKENS):
                output = self._model(
                    input_ids=fed[:, begin:end],
                    position_ids=torch.arange(begin, end, device=self._device)[None],
                    use_cache=True,
                    logits_to_keep=max(wanted, 1),
                    **cache_argument(cache),
                )
                cache = cache_of(output)
                if wanted:
                    tokens_R = fed[0, end - wanted + 1 : end + 1]
                    parts.append(self._intervals(output.logits[0], tokens_R, temperature))
        return joined(parts)

    def _intervals(self, logits_RV: torch.Tensor, tokens_R: torch.Tensor, temperature: float) -> Intervals:
        device = "cpu" if self._device.type == "mps" else self._device  # MPS has no float64.
        temperature_R = torch.full((len(tokens_R),), temperature, dtype=torch.float64, device=device)
        below_R, logprobs_R = torch_draws.interval(logits_RV, tokens_R.to(device), temperature_R)
        return below_R.numpy(force=True), logprobs_R.numpy(force=True)

    @property
    def kept(self) -> KeptKeys:
        return self._prefixes.kept(self._row.per_token)

    def forget(self, version: int | None = None) -> None:
        self._prefixes.forget(version)

    @property
    def _is_short_of_memory(self) -> bool:
        """True if a GPU's memory is almost used up. (The worker itself checks the host's memory.)"""
        if self._device.type != "cuda":
            return False
        free, total = torch.cuda.mem_get_info(self._device)
        unused = torch.cuda.memory_reserved(self._device) - torch.cuda.memory_allocated(self._device)
        return free + unused < total // _SPARE_PART

    def close(self) -> None:
        self._prefixes.clear()
        self._model = self._idle = None
        self._layers = {}


class _Checked:
    """Iterator over the groups that the model can draw. It collects the other groups as failed."""

    def __init__(self, groups: Iterator[GroupRequest], *, vocab_size: int, max_positions: int) -> None:
        self._groups = groups
        self._vocab_size = vocab_size
        self._max_positions = max_positions
        self._failed: list[GroupFailed] = []

    def __iter__(self) -> _Checked:
        return self

    def __next__(self) -> GroupRequest:
        while True:
            request = next(self._groups)
            try:
                check_request(request, vocab_size=self._vocab_size, max_positions=self._max_positions)
            except BackendError as error:
                self._failed.append(GroupFailed.of(request.lease_id, error))
            else:
                return request

    def take_failed(self) -> list[GroupFailed]:
        failed, self._failed = self._failed, []
        return failed


@contextlib.contextmanager
def _memory_errors() -> Iterator[None]:
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not ran_out(error):
            raise
        raise BackendError(
            "The device has too little memory.",
            got=str(error),
            do="Lower the node's width or kv_cache_bytes.",
            code=OUT_OF_MEMORY,
        ) from error


def _device(name: str) -> torch.device:
    device = torch.device(name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BackendError(
            "PyTorch finds no CUDA device.", got=name, do="Install PyTorch for CUDA and the NVIDIA driver, or use cpu."
        )
    return device


def _dtype(base_dir: Path, precision: str, device: torch.device) -> torch.dtype:
    """Return the requested precision.

    For auto: float32 for small models, else 16 bits. A CPU that does not multiply bfloat16 in hardware is faster in
    float32; its models stay in float32 up to a third of its memory.
    """
    if precision in _DTYPES:
        return _DTYPES[precision]
    if precision != "auto":
        raise BackendError(
            "PyTorch does not have this precision here.", got=precision, do="Use auto, f32, f16 or bf16."
        )
    stored_bytes = sum(file.stat().st_size for file in weights_of(base_dir))
    if 2 * stored_bytes <= _F32_MODEL_BYTES:
        return torch.float32
    if device.type == "cuda":
        return torch.bfloat16 if multiplies(device, torch.bfloat16) else torch.float16
    fits = 2 * stored_bytes <= psutil.virtual_memory().total // 3
    return torch.float32 if fits and not multiplies(device, torch.bfloat16) else torch.bfloat16
