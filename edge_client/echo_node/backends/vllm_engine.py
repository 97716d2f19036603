"""vLLM as a sampling engine, for CUDA GPUs with enough memory. vLLM does the batching, prompt caching and adapters.

A logits processor draws tokens as `echo_shared.sampling.draws` defines. It sets the drawn token's logit to the token's
log-probability and all other logits to -inf. vLLM's greedy sampling then picks that token, and its report of processed
logits returns the log-probability. vLLM computes adapters in 16 bits only, so its rollouts differ slightly from the
float32 reference.

The cache key of a prompt includes the adapter's name, which is new for each policy version. A rollout that continues a
prefix is, for vLLM, one whose prompt ends with the prefix: the cache holds the part that it shares with its group.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import save_file
from torch import Tensor

from echo_node.backends.base import OUT_OF_MEMORY, EngineEvent, EngineSettings, GroupFailed, check_request
from echo_shared.delta.adapter import CONFIG_FILE, WEIGHTS_FILE, Adapter, load_adapter
from echo_shared.delta.base_weights import weights_of
from echo_shared.errors import POLICY_UNUSABLE, BackendError
from echo_shared.sampling import draws
from echo_shared.sampling.interface import DrawnPart, FinishedRollout, GroupRequest, Prefix
from echo_shared.sampling.prefix_cache import KeptKeys
from echo_shared.sampling.scoring import Intervals
from echo_shared.sampling.torch_draws import draw_float64
from echo_shared.wire.messages import FinishReason

DEFAULT_WIDTH: Final = 256
MAX_RANK: Final = 64
"""Maximum rank of an adapter, for which vLLM reserves memory at its start."""

_MEMORY_SHARE: Final = 0.85
"""Fraction of the GPU's memory for weights, activations and, unless `kv_cache_bytes` is set, keys and values."""
_TELL_TOKENS: Final = 16
"""vLLM reports a rollout after this number of tokens. Each report costs processor time."""
_DTYPES: Final = {"auto": "auto", "f16": "float16", "bf16": "bfloat16"}
_PRECISIONS: Final = {"torch.float32": "f32", "torch.float16": "f16", "torch.bfloat16": "bf16"}
_ENVIRONMENT: Final = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # This process is already a child, so the engine runs inside it.
    "VLLM_USE_V2_MODEL_RUNNER": "1",  # The logits processor needs this model runner.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_NO_USAGE_STATS": "1",
}


@dataclasses.dataclass(slots=True)
class VllmPolicy:
    """An adapter's directory in the form that vLLM reads (see `base.PreparedPolicy`)."""

    number: int
    directory: Path

    @property
    def name(self) -> str:
        return f"policy-{self.number}"

    def free(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


@dataclasses.dataclass(slots=True, eq=False)
class _Running:
    """An unfinished rollout: the tokens of its prefix, then those that vLLM has returned."""

    request: GroupRequest
    index: int
    started_at: float
    ids: list[int]
    logprobs: list[float]
    num_given: int
    num_told: int

    def news(self) -> DrawnPart:
        """Return the rollout's unreported tokens, and count them as reported."""
        start, self.num_told = self.num_told, len(self.ids)
        return DrawnPart(
            lease_id=self.request.lease_id,
            index=self.index,
            policy_version=self.request.policy_version,
            start=start,
            ids=np.array(self.ids[start:], np.int32),
            logprobs=np.array(self.logprobs[start:], np.float32),
            sampling_s=time.perf_counter() - self.started_at,
        )


class VllmEngine:
    """An engine that samples with vLLM (`base.Engine`). It cannot score: vLLM reports log-probabilities of a prompt's
    tokens, but not their place in the cumulative distribution.
    """

    scores = False
    converted: Path | None = None
    """None, because vLLM reads the base model's own files."""

    def open(self, base_dir: Path, derived_dir: Path, settings: EngineSettings) -> int:
        if settings.precision not in _DTYPES:
            raise BackendError(
                "vLLM does not have this precision here.",
                got=settings.precision,
                do=f"Use one of {', '.join(_DTYPES)}.",
            )
        self._width = settings.width or DEFAULT_WIDTH
        self._shapes = read_shapes(base_dir)
        derived_dir.mkdir(parents=True, exist_ok=True)
        self._policies_dir = Path(tempfile.mkdtemp(prefix="vllm-", dir=derived_dir))
        self._numbers = itertools.count(1)
        self._running: dict[str, _Running] = {}
        self._lora: Any = None
        os.environ.update(_ENVIRONMENT)
        with _vllm_errors("vLLM could not load the base model."):
            self._engine: Any = _make_engine(base_dir, settings, self._width)
        config = self._engine.model_config
        self.precision = _PRECISIONS.get(str(config.dtype), "")
        self._vocab_size = int(config.get_vocab_size())
        # One token less than vLLM's limit: vLLM ends a sequence at the limit, even though the last token need not be
        # fed.
        self._max_positions = int(config.max_model_len) - 1
        return self._width

    def prepare(self, adapter_dir: Path) -> VllmPolicy:
        adapter = load_adapter(adapter_dir)
        check_adapter(adapter, self._shapes)
        number = next(self._numbers)
        policy = VllmPolicy(number, self._policies_dir / str(number))
        policy.directory.mkdir()
        write_adapter(adapter, policy.directory)
        return policy

    def set_policy(self, policy: VllmPolicy | None) -> None:
        self._lora = None
        if policy is None:
            return
        from vllm.lora.request import LoRARequest

        lora = LoRARequest(lora_name=policy.name, lora_int_id=policy.number, lora_path=str(policy.directory))
        with _vllm_errors("vLLM could not load an adapter."):
            self._engine.add_lora(lora)
        self._lora = lora

    def sample(self, groups: Iterator[GroupRequest]) -> Iterator[list[EngineEvent]]:
        self._abort(list(self._running))
        while True:
            events: list[EngineEvent] = []
            with _vllm_errors("vLLM failed."):
                self._submit(groups, events)
                outputs = self._engine.step() if self._running else []
            events += [
                self._finished(self._running.pop(output.request_id))
                for output in outputs
                if output.request_id in self._running and self._take(output)
            ]
            if not events and not self._running:
                return
            yield events

    def cancel(self, lease_id: int) -> None:
        self._abort([name for name, row in self._running.items() if row.request.lease_id == lease_id])

    def news(self) -> list[DrawnPart]:
        return [row.news() for row in self._running.values() if row.num_told < len(row.ids)]

    def score(self, ids: NDArray[np.int32], first: int, temperature: float) -> Intervals:
        raise BackendError("vLLM does not score completions.", got=f"{len(ids)} tokens from {first}")

    @property
    def kept(self) -> KeptKeys:
        return KeptKeys()  # vLLM keeps prefixes itself, inside its memory for keys and values.

    def forget(self, version: int | None = None) -> None:
        """Do nothing: vLLM drops its oldest prefixes itself, and never takes those of another adapter."""

    def close(self) -> None:
        engine = getattr(self, "_engine", None)
        if engine is not None:
            engine.engine_core.shutdown()
            self._engine = None
            shutil.rmtree(self._policies_dir, ignore_errors=True)

    def _submit(self, groups: Iterator[GroupRequest], events: list[EngineEvent]) -> None:
        """Submit whole groups while fewer than `width` rollouts run. vLLM queues the excess."""
        from vllm import SamplingParams, TokensPrompt

        while len(self._running) < self._width and (request := next(groups, None)) is not None:
            try:
                check_request(request, vocab_size=self._vocab_size, max_positions=self._max_positions)
            except BackendError as error:
                events.append(GroupFailed.of(request.lease_id, error))
                continue
            prefixes = {prefix.index: prefix for prefix in request.prefixes}
            for index in request.indices:
                name = f"rollout-{next(self._numbers)}"
                self._running[name] = row = _begun(request, index, prefixes.get(index))
                prompt = TokensPrompt(prompt_token_ids=[*request.prompt_ids.tolist(), *row.ids])
                params = SamplingParams(**sampling_options(request, index, num_given=row.num_given))
                self._engine.add_request(name, prompt, params, lora_request=self._lora)

    def _abort(self, names: list[str]) -> None:
        for name in names:
            del self._running[name]
        if names:
            self._engine.abort_request(names)

    def _take(self, output: Any) -> bool:
        """Store the tokens that vLLM returns for a rollout. Return True if the rollout is complete."""
        row, completion = self._running[output.request_id], output.outputs[0]
        row.ids += completion.token_ids
        row.logprobs += list(completion.logprobs.logprobs)
        if len(row.logprobs) != len(row.ids) or not np.isfinite(row.logprobs[row.num_told :]).all():
            raise BackendError(
                "The model computed values that are not numbers (NaN or infinite).",
                got=f"{len(row.ids)} tokens",
                code=POLICY_UNUSABLE,
            )
        return bool(output.finished)

    @staticmethod
    def _finished(row: _Running) -> FinishedRollout:
        stopped = row.ids[-1] in row.request.stop_ids
        return FinishedRollout(
            lease_id=row.request.lease_id,
            group_id=row.request.group_id,
            index=row.index,
            policy_version=row.request.policy_version,
            completion_ids=np.array(row.ids, np.int32),
            behavior_logprobs=np.array(row.logprobs, np.float32),
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            sampling_s=time.perf_counter() - row.started_at,
            num_given=row.num_given,
        )


def _begun(request: GroupRequest, index: int, prefix: Prefix | None) -> _Running:
    ids, logprobs = ([], []) if prefix is None else (prefix.ids.tolist(), prefix.logprobs.tolist())
    return _Running(request, index, time.perf_counter(), ids, logprobs, num_given=len(ids), num_told=len(ids))


class DrawTable:
    """Random numbers (uniform in [0, 1)) and temperature of the rollout in each request slot of vLLM. The length of the
    slot's sequence gives the index of the next random number.
    """

    def __init__(self, num_slots: int) -> None:
        self._in_use = np.zeros(num_slots, np.bool_)
        self._u = np.zeros((num_slots, 16))
        self._temperature = np.ones(num_slots)
        self._prompt_tokens = np.zeros(num_slots, np.int64)

    def start(self, slot: int, options: Mapping[str, Any] | None, max_tokens: int) -> bool:
        """Put a rollout with these `sampling_options` and `max_tokens` new tokens into a slot. Return False for a
        request of vLLM's own, such as its warm-up.
        """
        self._in_use[slot] = options is not None and "echo_seed" in options
        if options is None or not self._in_use[slot]:
            return False
        count = options["echo_given"] + max_tokens
        missing = max(0, count - self._u.shape[1])
        self._u = np.pad(self._u, ((0, 0), (0, missing)))
        self._u[slot, :count] = draws.uniforms(options["echo_seed"], options["echo_index"], count)
        self._temperature[slot] = options["echo_temperature"]
        self._prompt_tokens[slot] = options["echo_prompt_tokens"]
        return True

    def force(self, logits_RV: Tensor, slots_R: NDArray[Any], lengths_R: NDArray[Any]) -> Tensor:
        """Draw for each row [R, V], in place: the drawn token's logit becomes its log-probability, all others -inf."""
        if not self._in_use[slots_R].any():
            return logits_RV
        # While vLLM feeds a prompt in pieces, the index is out of range. vLLM discards the tokens drawn then.
        position = np.clip(lengths_R - self._prompt_tokens[slots_R], 0, self._u.shape[1] - 1)
        u_R = torch.from_numpy(self._u[slots_R, position]).to(logits_RV.device)
        temperature_R = torch.from_numpy(self._temperature[slots_R]).to(logits_RV.device)
        tokens_R, logprobs_R = draw_float64(logits_RV, u_R, temperature_R)
        logits_RV.fill_(-torch.inf)
        return logits_RV.scatter_(1, tokens_R[:, None], logprobs_R[:, None].to(logits_RV.dtype))


def sampling_options(request: GroupRequest, index: int, *, num_given: int) -> dict[str, Any]:
    """Return vLLM's SamplingParams for one rollout. They ask for greedy sampling: the logits processor leaves only the
    drawn token.
    """
    from vllm.sampling_params import RequestOutputKind

    return {
        "temperature": 0.0,
        "max_tokens": request.max_tokens - num_given,
        "stop_token_ids": list(request.stop_ids),
        "ignore_eos": True,
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
        "output_kind": RequestOutputKind.DELTA,
        "extra_args": {
            "echo_seed": request.seed,
            "echo_index": index,
            "echo_temperature": request.temperature,
            "echo_prompt_tokens": len(request.prompt_ids),
            "echo_given": num_given,
        },
    }


def read_shapes(base_dir: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of the model in `base_dir`. Raises BackendError if there are no safetensors
    files.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for file in weights_of(base_dir):
        with safe_open(file, framework="numpy") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    return shapes


def check_adapter(adapter: Adapter, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raise BackendError unless the adapter fits the model with these tensors and its rank is allowed."""
    if adapter.max_rank > MAX_RANK:
        raise BackendError(
            "An adapter's rank exceeds the rank that vLLM was started with.",
            got=f"{adapter.max_rank}, {MAX_RANK} at most",
            do="Run this node with the torch backend: echo-node run --backend torch",
        )
    for module in adapter.modules:
        if shapes.get(f"{module.path}.weight") != (len(module.b), module.a.shape[1]):
            raise BackendError("An adapter changes a layer that the base model does not have.", got=module.path)


def write_adapter(adapter: Adapter, directory: Path) -> None:
    """Write the adapter in PEFT's layout: the same rank for all layers, and scaling 1, because the tensors already
    contain the scale.
    """
    tensors = {}
    for module in adapter.modules:
        missing = (0, adapter.max_rank - len(module.a))
        tensors[f"base_model.model.{module.path}.lora_A.weight"] = np.pad(module.a, (missing, (0, 0)))
        tensors[f"base_model.model.{module.path}.lora_B.weight"] = np.pad(module.b, ((0, 0), missing))
    save_file(tensors, directory / WEIGHTS_FILE)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "r": adapter.max_rank,
        "lora_alpha": adapter.max_rank,
        "target_modules": sorted({module.path.rpartition(".")[2] for module in adapter.modules}),
    }
    (directory / CONFIG_FILE).write_text(json.dumps(config), encoding="utf-8")


def _make_engine(base_dir: Path, settings: EngineSettings, width: int) -> Any:
    from vllm import EngineArgs, LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=str(base_dir),
            skip_tokenizer_init=True,
            generation_config="vllm",
            dtype=_DTYPES[settings.precision],
            max_model_len=-1,
            max_num_seqs=width,
            stream_interval=_TELL_TOKENS,
            gpu_memory_utilization=_MEMORY_SHARE,
            kv_cache_memory_bytes=settings.kv_cache_bytes or None,
            enable_prefix_caching=True,
            enable_lora=True,
            max_loras=1,
            max_lora_rank=MAX_RANK,
            logits_processors=[_processor_class()],
            logprobs_mode="processed_logits",
            disable_log_stats=True,
        )
    )


def _processor_class() -> type:
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

    class SeededDraws(LogitsProcessor):  # type: ignore[misc]
        """Seeded draws as a logits processor of vLLM. Its input is the model's own logits, in float32."""

        def __init__(self, vllm_config: Any, req_states: Any) -> None:
            super().__init__(vllm_config, req_states)
            self._table = DrawTable(req_states.max_num_reqs)

        def add_request(self, req_idx: int, sampling_params: Any) -> bool:
            return self._table.start(req_idx, sampling_params.extra_args, sampling_params.max_tokens or 0)

        def apply(self, logits: Tensor, ctx: Any) -> Tensor:
            lengths = ctx.seq_lens_upper_bound_np[: len(ctx.idx_mapping_np)]
            return self._table.force(logits, ctx.idx_mapping_np, lengths)

    return SeededDraws


@contextmanager
def _vllm_errors(what: str) -> Iterator[None]:
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise BackendError(
            "The GPU has too little memory.", got=str(error), do="Lower the node's width.", code=OUT_OF_MEMORY
        ) from error
    except (OSError, ValueError, RuntimeError) as error:
        raise BackendError(what, got=str(error)) from error
