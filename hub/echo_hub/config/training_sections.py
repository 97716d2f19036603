"""How training goes on from step to step, and how the learner computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Final, Literal

from pydantic import Field, field_validator, model_validator

from echo_hub.config.section import Precision, Section
from echo_shared.adapter import ATTENTION, FEED_FORWARD, PROJECTIONS, lora_scaling

LEAST_TOKENS: Final = 64
PLAIN_TOKENS: Final = 16_384
"""Of a micro-batch on a device whose memory is not measured."""

_TARGETS: Final[Mapping[str, frozenset[str]]] = {"all": PROJECTIONS, "attention": ATTENTION, "mlp": FEED_FORWARD}


class TrainingConfig(Section):
    """Reinforcement learning of a LoRA adapter, step by step."""

    steps: Annotated[int, Field(ge=1)] = 60
    """Steps of the whole run; each turns a policy version into the next."""
    groups_per_step: Annotated[int, Field(ge=1, le=4096)] = 64
    """Prompts in the batch of one step."""
    group_size: Annotated[int, Field(ge=2, le=1024)] = 8
    """Completions of one prompt, compared with each other."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 2
    """Async mode: how many steps old a rollout may be when it is trained on."""
    publish_every: Annotated[int, Field(ge=1)] = 1
    """Steps between published versions."""
    on_new_version: Literal["finish", "interrupt"] = "finish"
    """What a node does with the completions that it is drawing when a newer version has reached it. finish: draws them
    to their end by the version that they began with. interrupt (async mode only): goes on in mid-completion by the
    newer one, once it has read again what is there; every token keeps its version, and max_staleness holds for the
    oldest. The node chooses after which token, and a dishonest one by what that earns: keep finish among strangers."""
    tokens_per_step: Annotated[int, Field(ge=0)] = 0
    """A step takes complete groups, oldest first, until they have this many sampled tokens, and the loss is divided by
    this number, so that no step weighs more than another (C3PO). At least one group, at most groups_per_step; 0 = off:
    always groups_per_step."""
    dynamic_sampling: bool = False
    """A group whose rewards are all equal teaches nothing: it is dropped, and another one is sampled in its place
    (DAPO). After four batches of such groups in search of one step's, they are trained on as they are. With credit =
    "turn", returns from the same turn on take the place of rewards."""
    curriculum: Literal["off", "skip", "learnability"] = "off"
    """Passes over problems that are known to teach nothing, before they are sampled (docs/tasks.md). skip: those that
    were all solved, or not at all, in their newest group. learnability: a problem with pass rate p is taken with the
    probability 4 p (1 - p). One that was never sampled is always taken."""
    curriculum_by: Literal["problem", "task"] = "problem"
    """Whose pass rate it is. problem: the prompt's own, for tasks whose problems come again, such as a file's. task:
    that of the task's newest 32 groups, in a run of several tasks, or levels, whose problems never end."""
    credit: Literal["episode", "turn"] = "episode"
    """What a turn's tokens are judged by, in tasks of several turns. episode: the whole episode's reward, against the
    group's. turn: the return from that turn on, against the returns of the group's episodes that came to the same
    turn (docs/learner.md)."""
    discount: Annotated[float, Field(gt=0, le=1)] = 1.0
    """With credit = "turn": what a reward counts one turn earlier."""
    updates_per_step: Annotated[int, Field(ge=1, le=64)] = 1
    """Optimizer updates in one step, each on its share of the step's groups, or of objective.shuffle_batches."""
    learning_rate: Annotated[float, Field(gt=0)] = 5e-4
    """Adam's, at its highest. For LoRA about ten times that of full fine-tuning."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises to that, linearly."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How it goes on over the run's steps: as it is, or down to `final_share` of it, evenly or by half a cosine."""
    final_share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """What is left of the learning rate behind the last step, unless it is constant."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Gradients with a larger norm are scaled down to it."""
    lora_rank: Annotated[int, Field(ge=1, le=1024)] = 16
    """Of the adapter on each linear layer that has one."""
    lora_alpha: Annotated[int, Field(ge=1)] = 32
    """The adapter is scaled by lora_alpha / lora_rank."""
    rslora: bool = False
    """The adapter is scaled by lora_alpha / sqrt(lora_rank) instead (rsLoRA): a high rank does not learn slower."""
    lora_targets: str = "all"
    """The linear layers that have an adapter: all, attention, mlp, or names with commas between them, of q_proj,
    k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj."""

    @property
    def lora_scaling(self) -> float:
        """What the adapter's B·A is multiplied by."""
        return lora_scaling(self.lora_rank, self.lora_alpha, rslora=self.rslora)

    @property
    def lora_projections(self) -> frozenset[str]:
        """`lora_targets` by the layers' names."""
        return _TARGETS.get(self.lora_targets) or frozenset(self.lora_targets.split(","))

    @field_validator("lora_targets")
    @classmethod
    def _check_targets(cls, targets: str) -> str:
        if targets in _TARGETS:
            return targets
        names = {name.strip() for name in targets.split(",")}
        if unknown := sorted(names - PROJECTIONS):
            raise ValueError(
                f"{', '.join(map(repr, unknown))} is no layer that an adapter may change: use "
                f"{', '.join(_TARGETS)}, or some of {', '.join(sorted(PROJECTIONS))}"
            )
        same = [name for name, layers in _TARGETS.items() if layers == names]
        return same[0] if same else ",".join(sorted(names))

    @model_validator(mode="after")
    def _fits_together(self) -> TrainingConfig:
        if self.discount != 1 and self.credit != "turn":
            raise ValueError('discount needs credit = "turn": the reward of a whole episode is not discounted')
        return self


class LearnerConfig(Section):
    """How the learner computes and what it keeps."""

    device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    """Where the learner trains: auto, cpu, cuda, cuda:1, mps."""
    precision: Precision = "auto"
    """Of the base model and computation; the adapter is trained in float32. auto: bfloat16 on a CUDA GPU that
    multiplies it, else float32."""
    base_bits: Literal[0, 4, 8] = 0
    """Bits of the base's weights in training: 4 or 8 by bitsandbytes (extra `quantized`), 0 = by precision."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of the learner; 0 = PyTorch's own choice."""
    processes: Annotated[int, Field(ge=1, le=1024)] = 1
    """Processes that train together on each host, one a GPU; the base model is spread over all of them."""
    hosts: Annotated[int, Field(ge=1, le=1024)] = 1
    """Hosts that train together, this one among them. On each of the others: `echo-hub learner`."""
    address: Annotated[str, Field(pattern=r"^([^:\s]+:\d{1,5})?$")] = ""
    """HOST:PORT of this host at which learner processes of other hosts meet. They trust whoever comes: it belongs on a
    network of your own."""
    micro_batch_tokens: Annotated[int, Field(ge=0)] = 0
    """Tokens of one forward and backward pass, a prompt counted once for each of its rollouts; at least 64. 0 = on a
    GPU what fits its memory, by a measurement at the start; else 16384. A step that runs out of memory is begun anew
    with half as many, and so are all that follow it."""
    kv_cache_bytes: Annotated[int, Field(ge=0)] = 0
    """Most memory for keys and values while the learner samples: in co-located mode, and in evaluations. 0 = half of
    what a GPU has free then, a quarter of a host's memory. A batch that runs out of memory goes on half as wide, and so
    do all that follow it. Of episodes of several turns, half of it keeps what the next turn's prompts begin with."""
    gradient_checkpointing: bool | Literal["auto"] = "auto"
    """Keeps only each layer's input for the backward pass: far less memory, a third to a half more time. auto: on a GPU
    that has too little memory without it."""
    offload_optimizer: bool = True
    """Co-located mode, on a GPU: the optimizer's state is in the host's memory while the learner samples."""
    deterministic: bool = True
    """A step that is trained again gives the very same adapter. Off, some of CUDA's kernels are faster."""
    hung_s: Annotated[float, Field(ge=0)] = 3_600.0
    """A learner that has work and has computed no micro-batch and finished no rollout for so long is ended and started
    again from its checkpoint; 0 = never. One that gives no sign of life at all is ended after two minutes."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 1
    """Steps between checkpoints; a killed learner repeats the steps since the last one."""
    checkpoints_kept: Annotated[int, Field(ge=1)] = 3
    """Older checkpoints are removed; published versions stay."""
    checkpoint_milestones: Annotated[int, Field(ge=0)] = 0
    """Checkpoints of the steps that this divides are never removed; 0 = none is kept for ever."""
    adapters_kept: Annotated[int, Field(ge=1)] = 200
    """Newest published adapters that stay in RUN/adapters, for `echo-hub export` and `echo-hub eval`."""
    adapters_max_bytes: Annotated[int, Field(ge=0)] = 300_000_000
    """What they may take of the disk together. Beyond it older ones go, but the newest three stay; 0 = no bound."""

    @field_validator("micro_batch_tokens")
    @classmethod
    def _check_tokens(cls, tokens: int) -> int:
        if 0 < tokens < LEAST_TOKENS:
            raise ValueError(f"a micro-batch has at least {LEAST_TOKENS} tokens; 0 leaves it to the learner")
        return tokens

    @property
    def tokens_at_once(self) -> int:
        """`micro_batch_tokens`, where no memory was measured."""
        return self.micro_batch_tokens or PLAIN_TOKENS
