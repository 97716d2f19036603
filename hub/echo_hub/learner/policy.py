"""The policy: a frozen base model with one trainable LoRA adapter, managed by PEFT.

The adapter's weights are float32. `learner.precision` sets the type of the base's weights and of the computation;
`learner.base_bits` quantises the base's linear layers. The reference policy is the bare base, or the base with the
run's starting adapter. There is no second model.

`Policy.published` is the adapter in `dissemination.precision`, as nodes and the hub's own sampler get it. Training
continues from the unrounded float32 weights.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from echo_hub.config.section import Precision
from echo_hub.config.training_sections import LearnerConfig
from echo_hub.learner import gated_mlp, lora, packing, rms_norm, routing
from echo_hub.learner.batch import MicroBatch, PackedInputs
from echo_hub.learner.device import resolve_device
from echo_hub.learner.head import Head, check
from echo_hub.learner.logprobs import Screened, intervals, screened_logprobs, selected_logprobs
from echo_hub.learner.ranks import ALONE, TrainingRanks
from echo_hub.learner.settings import LearnerSettings
from echo_shared.delta.adapter import CONFIG_FILE, WEIGHTS_FILE, lora_scaling
from echo_shared.errors import LearnerError
from echo_shared.installation import how_to_install
from echo_shared.sampling.draws import derive_seed
from echo_shared.sampling.torch_precision import multiplies
from echo_shared.sampling.torch_routes import Routers

log = logging.getLogger(__name__)


class Policy:
    """The policy; create it with `load`. `model` is in eval mode (no dropout), so `echo_shared.sampling.torch_sampler`
    can sample from it."""

    def __init__(
        self,
        model: PeftModel,
        settings: LearnerSettings,
        *,
        device: torch.device,
        dtype: torch.dtype,
        ranks: TrainingRanks,
    ) -> None:
        self.model = model
        self.device = device
        self.ranks = ranks
        self.parameters: dict[str, torch.nn.Parameter] = {
            name.replace(".default.", "."): parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        """The adapter's trainable weights, by their names in PEFT's files."""
        self._dtype = dtype
        self._published_dtype = _dtype(settings.publish_precision, auto=dtype)
        self.computed: Callable[[], object] = lambda: None
        """Called after each forward pass of a micro-batch. The learner process sets it to its heartbeat, as a sign of
        progress."""
        self._temperature = settings.temperature
        own = settings.training
        self._scaling = lora_scaling(own.lora_rank, own.lora_alpha, rslora=own.rslora)
        self.checkpoints = settings.learner.gradient_checkpointing is True
        """True if gradient checkpointing is on now. The learner may change this, unless the setting is false."""
        self._packs_up_to = 0
        """Longest row that may be packed. If a batch has a longer row, it is computed row by row."""
        self._layers = lora.layers(model)
        self.routers = Routers.of(model)
        """The routers of a mixture of experts; None if the base has none whose routes can be replayed."""
        self.reference: Mapping[str, Tensor] | None = None
        """The adapter of the reference policy; None means that the base model alone is the reference."""

    @classmethod
    def load(
        cls, settings: LearnerSettings, ranks: TrainingRanks = ALONE, *, dtype: torch.dtype | None = None
    ) -> Policy:
        """Load the base with a fresh adapter that changes nothing yet: policy version 0.

        The same seed gives the same adapter. `dtype` is the type of the base's weights; None means `learner.precision`.
        Raises LearnerError if the base cannot be loaded or trained here. With several ranks, all of them raise if one
        does.
        """
        with ranks.agreement():
            device = resolve_device(settings.learner.device)
        dtype = dtype or _dtype(settings.learner.precision, auto=_suitable_dtype(device, ranks))
        if device.type == "cpu" and dtype is torch.bfloat16 and not multiplies(device, dtype):
            log.warning(
                "This processor cannot multiply bfloat16, which learner.precision asks for: a step may take hours. "
                "Set learner.precision to auto or float32."
            )
        with ranks.agreement():
            model = _load_model(settings, device, dtype)
        policy = cls(model, settings, device=device, dtype=dtype, ranks=ranks)
        policy._prepare(settings.learner)
        return policy

    def _prepare(self, settings: LearnerConfig) -> None:
        if self.ranks.count == 1:
            # Several ranks move the base model layer by layer instead, because one device may not hold the whole model.
            self.model.to(self.device)
        if settings.base_bits == 4:
            for module in self._body.modules():
                if type(module).__name__ == "Linear4bit":
                    # In eval mode, bitsandbytes converts its weights for CPU kernels, which have no gradient.
                    module.train()
        with self.autocast():
            held_on = next(self._body.parameters()).device
            check(self.model.get_base_model(), held_on)
            self._packs_up_to = packing.longest_packed(self._body, held_on)
        for layer in self._body.modules():
            if settings.gradient_checkpointing and isinstance(layer, GradientCheckpointingLayer):
                self._checkpoint(layer)
        # Ranks that share a base must compute its layers in lockstep. Ranks that compute row by row do not, so each of
        # them holds the whole base.
        if self._packs_up_to == sys.maxsize and not settings.base_bits:
            self.ranks.shard(self.model, self.device.type)
        self.model.to(self.device)

    def _checkpoint(self, layer: GradientCheckpointingLayer) -> None:
        """Let the layer's forward pass keep only the layer's inputs; the backward pass recomputes the layer."""
        forward = layer.forward

        def run(*args: Any, **kwargs: Any) -> Any:
            if not self.checkpoints or not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            recompute = partial(routing.recomputing, self.routers)
            return checkpoint(
                forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=recompute, **kwargs
            )

        layer.forward = run

    @property
    def _body(self) -> Any:
        return self.model.get_base_model().base_model

    @property
    def is_float32(self) -> bool:
        """True if the policy computes in float32."""
        return self._dtype == torch.float32

    def autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self._dtype == torch.bfloat16)

    def logprobs(self, batch: MicroBatch) -> Tensor:
        """Return the learner's log-probabilities of the batch's drawn tokens, float32 nats [N], with their graph."""
        with self.autocast():
            return selected_logprobs(
                self.predicting_states(batch), self.head, batch.target_ids_N, temperature=self._temperature
            )

    def screened(self, batch: MicroBatch, *, entropy_gradient: bool = False) -> Screened:
        """Return `logprobs` with the other fields of `Screened`, all from one forward pass. With `entropy_gradient`,
        entropies have an autograd graph too.
        """
        with self.autocast():
            return screened_logprobs(
                self.predicting_states(batch),
                self.head,
                batch.target_ids_N,
                batch.uniforms_N,
                temperature=self._temperature,
                entropy_gradient=entropy_gradient,
            )

    @torch.no_grad()
    def intervals(
        self,
        batch: MicroBatch,
        *,
        greedy_N: Tensor | None = None,
        temperature_N: Tensor | None = None,
        adapters: Sequence[tuple[Mapping[str, Tensor], int]],
    ) -> tuple[Tensor, Tensor]:
        """Return two float64 tensors [N] for the tokens of the batch: the lower end of the interval of cumulative
        probability that draws each token, and each token's true log-probability (see `logprobs.intervals`).

        `greedy_N` marks greedy choices. `temperature_N`: float64 temperature of each token; None = the run's.
        `adapters` holds pairs: weights (of `read_adapter` or `published`), and the number of consecutive positions T to
        compute with them. Pass several adapters only if `takes_several` returns True.
        """
        if len(adapters) == 1:
            self.set_adapter(adapters[0][0])
            adapters = ()
        with self.autocast(), lora.computing_by(self._layers, adapters):
            return intervals(
                self.predicting_states(batch),
                self.head,
                batch.target_ids_N,
                greedy_N,
                temperature=self._temperature if temperature_N is None else temperature_N,
            )

    @torch.no_grad()
    def states(self, batch: MicroBatch) -> Tensor:
        """Return the last hidden states [N, H] at the positions that predict a drawn token, with
        the current adapter.
        """
        with self.autocast():
            return self.predicting_states(batch)

    @property
    def base_storages(self) -> frozenset[int]:
        """Return the memory addresses of the storages that hold the base model's weights."""
        return frozenset(weight.untyped_storage().data_ptr() for weight in self.base_weights.values())

    @property
    def base_weights(self) -> dict[str, Tensor]:
        """Return the base model's weights by their names in transformers."""
        own = {id(parameter) for parameter in self.parameters.values()}
        return {
            name.removeprefix("base_model.model.").replace(".base_layer.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if id(parameter) not in own
        }

    def takes_several(self, batch: MicroBatch) -> bool:
        """Return True if one pass can use several adapters: the batch is packed, and all adapted layers are
        `LoraLinear`.
        """
        return batch.rows.longest <= self._packs_up_to and 2 * len(self._layers) == len(self.parameters)

    @property
    def vocab_size(self) -> int:
        return int(self._body.config.vocab_size)

    @property
    def head(self) -> Head:
        return Head.of(self.model.get_base_model())

    def predicting_states(self, batch: PackedInputs) -> Tensor:
        """Return the last hidden states [N, H] at the positions that predict a token, with their graph."""
        if batch.rows.longest <= self._packs_up_to:
            body = routing.following(self._body, self.routers, batch.routes_TB)
            hidden_TH = packing.packed_states(body, batch.input_ids_T, batch.position_ids_T, batch.rows)
        else:
            body = routing.following(self._body, self.routers, batch.routes_TB, rows=batch.rows)
            hidden_TH = packing.separate_states(body, batch.input_ids_T, batch.rows)
        self.computed()
        return packing.take(hidden_TH, batch.predictors_N)

    @torch.no_grad()
    def reference_logprobs(self, batch: MicroBatch) -> Tensor:
        """Return the reference policy's log-probabilities of the batch's drawn tokens, float32 nats [N]."""
        with self.model.disable_adapter() if self.reference is None else self.holding(self.reference):
            return self.logprobs(batch)

    def published(self, weights: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """Return the adapter, or `weights`, as nodes get it: A [R, I] and B [O, R] by PEFT's names.

        Conversion to bfloat16 rounds to nearest, ties to even.
        """
        return {
            name: weight.detach().to(self._published_dtype) for name, weight in (weights or self.parameters).items()
        }

    def save_adapter(self, directory: Path, weights: Mapping[str, Tensor] | None = None) -> None:
        """Write the adapter, or `weights`, in PEFT's layout. Equal weights give equal bytes."""
        tensors = {name: weight.detach().cpu() for name, weight in (weights or self.parameters).items()}
        # Write the file here: safetensors' own writer hides why a disk refuses.
        (directory / WEIGHTS_FILE).write_bytes(save(tensors, metadata={"format": "pt"}))
        config = {**self.model.peft_config["default"].to_dict(), "inference_mode": True}
        config = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        (directory / CONFIG_FILE).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")

    def read_foreign(self, directory: Path) -> dict[str, Tensor]:
        """Read a tenant's adapter as float32 weights for `set_adapter`. Its rank and scale may differ from this
        policy's, and it may lack layers. B is multiplied by the ratio of the two scales. Layers that the adapter lacks
        get zeros.

        Raises LearnerError if the adapter cannot be read, or has a layer that this policy lacks.
        """
        try:
            config = json.loads((directory / CONFIG_FILE).read_bytes())
            tensors = load((directory / WEIGHTS_FILE).read_bytes())
            scaling = lora_scaling(config["r"], config["lora_alpha"], rslora=bool(config.get("use_rslora")))
        except (OSError, SafetensorError, ValueError, KeyError) as error:
            raise LearnerError("An adapter cannot be read.", got=f"{directory}: {error}") from error
        if unknown := sorted(set(tensors) - set(self.parameters)):
            raise LearnerError(
                "A tenant's adapter has a layer that the run's adapter lacks.",
                got=f"{directory}: {unknown[0]}",
                do='Set training.lora_targets to "all".',
            )
        weights = {}
        for name, parameter in self.parameters.items():
            outputs, inputs = parameter.shape
            if name in tensors:
                weights[name] = tensors[name].float() * (scaling / self._scaling if ".lora_B." in name else 1.0)
            elif ".lora_B." in name:
                weights[name] = torch.zeros(outputs, 1)
            else:
                weights[name] = torch.zeros(1, inputs)
        return weights

    def read_adapter(self, directory: Path) -> dict[str, Tensor]:
        """Read the adapter in `directory` as float32.

        Raises LearnerError unless the file has exactly the tensors of this policy's adapter.
        """
        try:
            # Read the file at once: mapping it takes more than twice as long for a small adapter.
            tensors = load((directory / WEIGHTS_FILE).read_bytes())
            weights = {name: weight.float() for name, weight in tensors.items()}
        except (OSError, SafetensorError) as error:
            raise LearnerError("An adapter cannot be read.", got=f"{directory}: {error}") from error
        shapes = {name: parameter.shape for name, parameter in self.parameters.items()}
        if {name: weight.shape for name, weight in weights.items()} != shapes:
            raise LearnerError(
                "An adapter does not fit the base model and LoRA settings of this run.",
                got=f"{directory}: {len(weights)} tensors, {len(shapes)} expected",
                do="Use the base model, training.lora_rank and training.lora_targets of the adapter's training.",
            )
        return weights

    @torch.no_grad()
    def set_adapter(self, weights: Mapping[str, Tensor]) -> None:
        """Compute with these weights from now on. They may have another rank than this policy's own."""
        for name, parameter in self.parameters.items():
            if parameter.shape == weights[name].shape:
                parameter.copy_(weights[name])
            else:
                parameter.data = weights[name].to(device=parameter.device, dtype=parameter.dtype, copy=True)

    @contextmanager
    def holding(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Let the policy compute with other weights (of `read_adapter` or `published`) within the `with` block, then
        restore the policy's own weights.
        """
        own = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.set_adapter(weights)
        try:
            yield
        finally:
            self.set_adapter(own)


def _load_model(settings: LearnerSettings, device: torch.device, dtype: torch.dtype) -> PeftModel:
    """Load the base model into host memory. A quantised base model is created on its device."""
    base = _load_base(settings, device, dtype)
    _check_is_text(base.config)
    config = LoraConfig(
        r=settings.training.lora_rank,
        lora_alpha=settings.training.lora_alpha,
        target_modules=lora.targets(base, settings.training),
        use_rslora=settings.training.rslora,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    if not settings.learner.base_bits:
        lora.use_in(config)
    torch.manual_seed(derive_seed("learner", settings.seed))
    with warnings.catch_warnings():
        # PEFT reads an attribute that transformers has renamed, which would print a warning.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        model = get_peft_model(base, config)
    model.peft_config["default"].base_model_name_or_path = settings.base_name
    gated_mlp.use_in(model)
    rms_norm.use_in(model)
    return model.eval()


def _load_base(settings: LearnerSettings, device: torch.device, dtype: torch.dtype) -> Any:
    packing.register()
    options: dict[str, Any] = {}
    if settings.learner.base_bits:
        options = {"quantization_config": _quantization(settings.learner.base_bits, dtype), "device_map": {"": device}}
    try:
        base: Any = AutoModelForCausalLM.from_pretrained(
            settings.base_dir,
            dtype=dtype,
            attn_implementation=packing.ATTENTION,
            local_files_only=True,
            use_safetensors=True,
            **options,
        )
        base.set_attn_implementation(packing.attention_of(base))
        return base
    except (ImportError, RuntimeError) as error:
        if not settings.learner.base_bits:
            raise
        raise LearnerError(
            "The base model cannot be loaded in quantised form here.",
            got=f"learner.base_bits = {settings.learner.base_bits}: {error}",
            do="Choose another device, or set learner.base_bits to 0. If bitsandbytes is missing: "
            f"{how_to_install('quantized')}",
        ) from error
    except (OSError, ValueError, SafetensorError) as error:
        raise LearnerError(
            "The base model cannot be loaded.",
            got=f"{settings.base_dir}: {error}",
            do="Set model.base to a causal LM in Hugging Face layout, with safetensors weights.",
        ) from error


def _quantization(bits: int, dtype: torch.dtype) -> BitsAndBytesConfig:
    """Return the quantisation. For 4 bits it is QLoRA's: NF4 with double quantization (arXiv 2305.14314, section 3)."""
    if bits == 8:
        return BitsAndBytesConfig(load_in_8bit=True)
    return BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype
    )


def _suitable_dtype(device: torch.device, ranks: TrainingRanks) -> torch.dtype:
    """Return bfloat16 on a GPU with bfloat16 products, else float32. Rank 0's device decides for all ranks."""
    told = {"bfloat16": device.type == "cuda" and multiplies(device, torch.bfloat16)} if ranks.rank == 0 else None
    return torch.bfloat16 if ranks.tell(told)["bfloat16"] else torch.float32


def _dtype(precision: Precision, *, auto: torch.dtype) -> torch.dtype:
    return {"auto": auto, "float32": torch.float32, "bfloat16": torch.bfloat16}[precision]


def _check_is_text(config: Any) -> None:
    """Raise LearnerError for models of images or sound with text, and for models that read text in both directions."""
    text = config.get_text_config(decoder=True)
    if text is config and not getattr(config, "use_bidirectional_attention", False):
        return
    raise LearnerError(
        "The base model is not a causal model of text alone.",
        got=config.model_type,
        do="Choose a text model of docs/models.md.",
    )
