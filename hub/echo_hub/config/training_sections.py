"""Settings of the training steps and of the learner's computation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from echo_hub.config.section import Precision, Section
from echo_shared.delta.adapter import ATTENTION, FEED_FORWARD, PROJECTIONS, lora_scaling

LEAST_TOKENS: Final = 64
PLAIN_TOKENS: Final = 16_384
"""Number of tokens of a micro-batch (one forward and backward pass) if the device's memory was not measured."""

_TARGETS: Final[Mapping[str, frozenset[str]]] = {
    "all": ATTENTION | FEED_FORWARD,
    "attention": ATTENTION,
    "mlp": FEED_FORWARD,
}


class TrainingConfig(Section):
    """Reinforcement learning of a LoRA adapter: its steps, batches and optimizer."""

    steps: Annotated[int, Field(ge=1)] = 60
    """Steps of the whole run; each turns a policy version into the next."""
    groups_per_step: Annotated[int, Field(ge=1, le=4096)] = 64
    """Number of prompts in the batch of one step."""
    group_size: Annotated[int, Field(ge=2, le=1024)] = 8
    """Number of completions of one prompt (a group). Advantages compare the rewards of a group's completions."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 2
    """In async mode, greatest age of a rollout when it is trained on, in steps (versions) since the version that
    sampled it."""
    publish_every: Annotated[int, Field(ge=1)] = 1
    """Number of steps from one published version to the next."""
    on_new_version: Literal["finish", "interrupt"] = "finish"
    """What a node does with unfinished completions when a newer version arrives. finish: it completes them with the
    version with which they began. interrupt (async mode only): it prefills the drawn tokens again and continues with
    the newer version. Every token keeps its version, and max_staleness limits the oldest one. The node decides at which
    token it switches, so a dishonest node could switch only where that raises its reward. Keep finish if machines of
    unknown people take part."""
    tokens_per_step: Annotated[int, Field(ge=0)] = 0
    """A step takes complete groups, the oldest first, until their completions together have this many tokens. The loss
    is divided by this number, so each token has the same weight in every step (C3PO). A step has at least one group,
    and at most groups_per_step. 0 = off: a step always has groups_per_step."""
    dynamic_sampling: bool = False
    """Drop groups with equal rewards, which teach nothing, and sample others in their place (DAPO). If the groups
    dropped for one step would fill four batches, the step trains on such groups too. With credit = "turn", the
    comparison uses returns counted from the same turn, not rewards."""
    curriculum: Literal["off", "skip", "learnability"] = "off"
    """Skip problems that teach nothing before they are sampled (docs/tasks.md). skip: skip a problem if the completions
    of its last group were all correct or all wrong. learnability: take a problem with pass rate p with probability 4 p
    (1 - p). New problems are always taken."""
    curriculum_by: Literal["problem", "task"] = "problem"
    """Source of the pass rate. problem: the problem's own groups, for tasks whose problems recur, such as a file's.
    task: the newest 32 groups of the task, for runs with several tasks or levels whose problems never recur."""
    credit: Literal["episode", "turn"] = "episode"
    """Basis of a turn's advantage, in tasks of several turns. episode: the episode's reward, compared with the group's.
    turn: the return from that turn on, compared with the returns of the group's episodes that reached the same turn
    (docs/learner.md)."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """With credit = "turn", a reward that comes n turns later is multiplied by this factor to the power n."""
    updates_per_step: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of optimizer updates in one step. Each update uses an equal share of the step's groups, or of
    objective.shuffle_batches."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-4
    """Adam's highest learning rate. LoRA needs about ten times the rate of full fine-tuning."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of steps in which the learning rate rises linearly to learning_rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate over the run: constant, or a linear or cosine decrease to final_share of the highest
    rate."""
    final_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """With schedule = "linear" or "cosine", share of the learning rate that is left after the last step."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """If the gradient's norm is larger than this, the gradient is scaled down to this norm."""
    lora_rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Rank of the adapter on each linear layer in lora_targets."""
    lora_alpha: Annotated[int, Field(ge=1)] = 32
    """Scale of the adapter: lora_alpha / lora_rank."""
    rslora: bool = False
    """Scale the adapter by lora_alpha / sqrt(lora_rank) instead (rsLoRA). Otherwise adapters of high rank learn more
    slowly."""
    lora_targets: str = "all"
    """Linear layers with an adapter: all, attention, mlp, or names separated by commas, such as q_proj,v_proj.
    attention includes layers in the place of attention: linear attention, Mamba, convolutions. mlp includes shared
    experts. Other experts and routers never have an adapter."""

    @property
    def lora_scaling(self) -> float:
        """Factor by which the product B·A of the adapter's two matrices is multiplied."""
        return lora_scaling(self.lora_rank, self.lora_alpha, rslora=self.rslora)

    @property
    def lora_projections(self) -> frozenset[str]:
        """Names of the layers that `lora_targets` selects. A base model usually has only some of these layers, unless
        the setting lists layers by name."""
        return _TARGETS.get(self.lora_targets) or frozenset(self.lora_targets.split(","))

    @property
    def names_layers(self) -> bool:
        """True if `lora_targets` lists names of layers."""
        return self.lora_targets not in _TARGETS

    @field_validator("lora_targets")
    @classmethod
    def _check_targets(cls, targets: str) -> str:
        if targets in _TARGETS:
            return targets
        names = {name.strip() for name in targets.split(",")}
        if unknown := sorted(names - PROJECTIONS):
            raise ValueError(
                f"{', '.join(map(repr, unknown))} cannot have an adapter: use "
                f"{', '.join(_TARGETS)}, or some of {', '.join(sorted(PROJECTIONS))}"
            )
        return ",".join(sorted(names))

    @model_validator(mode="after")
    def _fits_together(self) -> TrainingConfig:
        if self.discount != 1 and self.credit != "turn":
            raise ValueError('discount needs credit = "turn": the reward of a whole episode is not discounted')
        return self


class LearnerConfig(Section):
    """How the learner computes, and which files it keeps."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    """Device on which the learner trains: auto, cpu, cuda, cuda:1, mps."""
    precision: Precision = "auto"
    """Precision of the base model and of the computation. The adapter is trained in float32. auto: bfloat16 on a CUDA
    GPU that can multiply in bfloat16, else float32."""
    base_bits: Literal[0, 4, 8] = 0
    """Number of bits of the base's weights in training: 4 or 8 by bitsandbytes (extra `quantized`); 0 = as precision
    says."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of the learner; 0 = PyTorch's own choice."""
    processes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of processes on each host that train together, one for each GPU. They share the base model."""
    hosts: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of hosts that train together, including this one. Run `echo-hub learner` on each of the others."""
    address: Annotated[str, Field(pattern=r"^([^:\s]+:\d{1,5})?$")] = ""
    """HOST:PORT of this host, where learner processes of other hosts meet. The processes trust every client: use a
    private network."""
    micro_batch_tokens: Annotated[int, Field(ge=0)] = 0
    """Number of tokens of one forward and backward pass, at least 64. A prompt counts once for each of its rollouts. 0
    = measured at the start on a GPU, else 16384. If a step runs out of memory, it restarts with half as many tokens,
    and later steps use that size."""
    kv_cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Largest memory in bytes for keys and values while the learner samples, in co-located mode and in evaluations. 0 =
    half of a GPU's free memory, or a quarter of a host's memory. If a batch runs out of memory, it continues with half
    the width, and later batches use that width. If episodes have several turns, half of this memory keeps the keys and
    values of earlier turns for the next prompts."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Keep only each layer's input for the backward pass, and compute all other activations a second time. This needs
    far less memory, but the pass takes a third to a half longer. auto: only on a GPU whose memory would not suffice
    otherwise."""
    deterministic: bool = True
    """If true, a repeated step gives exactly the same adapter. If false, some CUDA kernels are faster."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 1
    """Number of steps from one checkpoint to the next. If the learner is killed, it repeats the steps since the last
    checkpoint."""
    checkpoints_kept: Annotated[int, Field(ge=1)] = 3
    """Number of newest checkpoints that are kept. Published versions are kept independently of this number."""
    checkpoint_milestones: Annotated[int, Field(ge=0)] = 0
    """Checkpoints of steps that are divisible by this number are never removed; 0 = no such steps."""
    adapters_kept: Annotated[int, Field(ge=1)] = 200
    """Number of newest published adapters that stay in RUN/adapters, for `echo-hub export` and `echo-hub eval`."""
    adapters_max_bytes: Annotated[int, Field(ge=0)] = 300_000_000
    """Largest disk space in bytes of the adapters in RUN/adapters together. Above it, older adapters are removed, but
    never the newest three; 0 = no limit."""

    @field_validator("micro_batch_tokens")
    @classmethod
    def _check_tokens(cls, tokens: int) -> int:
        if 0 < tokens < LEAST_TOKENS:
            raise ValueError(f"a micro-batch has at least {LEAST_TOKENS} tokens; 0 leaves it to the learner")
        return tokens

    @property
    def tokens_at_once(self) -> int:
        """Number of tokens of a micro-batch: the setting, or the default if it is 0 and no memory was measured."""
        return self.micro_batch_tokens or PLAIN_TOKENS
