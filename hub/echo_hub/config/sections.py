"""A run's settings, with one frozen class for each component. A component receives only its own section.

Every field has a docstring, which `echo_hub.config.file` writes into config.toml as a comment.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from echo_hub.config.about_section import AboutConfig
from echo_hub.config.gateways_section import GatewaysConfig
from echo_hub.config.objective_section import ObjectiveConfig
from echo_hub.config.operation_sections import AlertsConfig, LogConfig, MetricsConfig
from echo_hub.config.reward_section import RewardConfig
from echo_hub.config.scoring_sections import RayConfig, ScoringConfig
from echo_hub.config.section import Precision, Section
from echo_hub.config.serving_sections import DisseminationConfig, KeepingConfig, ServerConfig, StoreConfig
from echo_hub.config.sessions_section import SessionsConfig
from echo_hub.config.task_sections import ChosenSet, EvaluationConfig, SamplingConfig, TaskConfig
from echo_hub.config.tenants_section import OpenAiConfig, TenantsConfig, TinkerConfig
from echo_hub.config.training_sections import LearnerConfig, TrainingConfig
from echo_hub.tasks.names import NO_TASK
from echo_shared.errors import ConfigError
from echo_shared.wire.messages import MAX_BATCHED


class RunConfig(Section):
    """Identity and mode of this run."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = "echo"
    """Name of the run on the pages and for volunteers."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the run. All random choices derive their seeds from it by hashing."""
    mode: Literal["colocated", "sequential", "async"] = "async"
    """colocated: the hub itself samples. sequential: nodes sample, always with the newest version. async: nodes sample
    while the learner trains, and training.max_staleness limits how old their versions may be."""


class ModelConfig(Section):
    """The base model of the run, and the adapter with which the run starts."""

    base: str = "builtin:tiny"
    """`builtin:tiny`, `builtin:small`, a directory in Hugging Face layout, a GGUF file (which is unpacked once), or an
    id on a model hub."""
    gguf: str = ""
    """GGUF file of this base model for nodes that run llama.cpp, usually quantised. These nodes fetch it in place of
    the base model, and convert nothing. Give a file, or `owner/name:FILE.gguf` on a model hub, with `@REVISION` if
    needed. Of a split model, name any part. Empty = if `base` is a GGUF file, nodes get that file; otherwise they
    convert the base model themselves. `none` = nodes always convert."""
    start_from: str = ""
    """LoRA adapter with which the run starts. It must fit this base, training.lora_rank and training.lora_targets. Give
    a directory in PEFT's layout, or RUN@K for version K of the run in the directory RUN. The first start copies it as
    version 1, so step 2 is the first trained step. Empty = the run starts with the base. `echo-hub sft` sets it to its
    result."""


class LeaseConfig(Section):
    """How the hub leases work to nodes."""

    deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """Seconds after which another node also gets a lease for work that has not come back. The first valid result wins.
    If the hub knows the node's speed, it may lease the work to another node sooner."""
    first_window: Annotated[int, Field(ge=1, le=MAX_BATCHED)] = 4
    """Rollouts that a new node (none of its rollouts was scored yet) may hold at once while all nodes are new. As soon
    as any node is no longer new, a new node may hold only one. A node that claims a high speed gets more at once. Each
    rollout that a node returns in time raises the number that it may hold by one, or by three while results come back
    as fast as claimed. Each missed deadline lowers it by one."""


class CostConfig(Section):
    """The cost of nodes. Each node states its price per hour. A node without a price (a gift) always works. Of the
    nodes with a price, those with the cheapest rollouts work until the learner is busy; the rest stand by. The hub
    keeps the account, and makes no payments."""

    spend_cap_per_hour: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """Limit in US dollars per hour for all working nodes together; 0 = only nodes without a price work. Before the
    first trained step, all nodes that the limit allows work."""
    electricity_per_kwh: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Price in US dollars per kWh. The hub adds the cost of the power that a node states to the node's price; 0 = the
    power costs you nothing."""
    margin: Annotated[float, Field(ge=1, le=10)] = 1.15
    """Factor for reserve: the working nodes should return this many times the rollouts that the learner needs."""
    dwell_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    """Shortest time in seconds for which a node works once the hub has started it, unless the node is lost or fails."""


class TrustConfig(Section):
    """How the hub finds nodes that do not sample as their leases demand (dishonest or broken nodes)."""

    verifier: Literal["process", "ray", "nodes", "off"] = "process"
    """What checks rollouts, by computing them again with the version that the node states. process: a process next to
    the learner, with low priority and a second copy of the base model in memory. ray: the same process under a Ray
    actor in the cluster of [ray]. nodes: proven nodes (whose earlier rollouts passed the checks) check others'
    rollouts; this needs three machines of different owners. off: nothing is checked."""
    verifier_device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    """Device of the verifier: auto, cpu, cuda, cuda:1, mps. It may be the learner's device, if the base model fits
    there twice. With trust.verifier = "ray": one of the actor's devices (ray.verifier_gpus)."""
    verifier_precision: Precision = "auto"
    """Precision of the verifier's computation: auto, float32 or bfloat16. auto computes in float32, but if float32
    weights would take more than a quarter of the GPU's memory, the weights stay in the 16 bits of the base's files.
    With bfloat16 a GPU checks faster, but the verifier then has rounding errors as large as those of some engines,
    and misses some forgers. Choose bfloat16 only if checks wait for the verifier."""
    verifier_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads of the verifier."""
    least_checked: Annotated[float, Field(ge=0, le=1)] = 0.03
    """Share of a proven node's rollouts that is checked in the long run. A node is proven when enough of its rollouts
    have passed the checks."""
    first_checked: Annotated[int, Field(ge=1, le=4096)] = 64
    """All of a node's first rollouts are checked before training, up to this number. After that, the checked share
    falls with each honest rollout: to half when twice this number was checked, and finally to least_checked. A rollout
    of at least 128 tokens counts several times, one of at least 512 tokens eight times."""


class HubConfig(BaseSettings):
    """All settings of a run: every section of config.toml."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix="ECHO_HUB_", env_nested_delimiter="__")

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    reward: RewardConfig = RewardConfig()
    scoring: ScoringConfig = ScoringConfig()
    sessions: SessionsConfig = SessionsConfig()
    ray: RayConfig = RayConfig()
    sampling: SamplingConfig = SamplingConfig()
    training: TrainingConfig = TrainingConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    leases: LeaseConfig = LeaseConfig()
    cost: CostConfig = CostConfig()
    trust: TrustConfig = TrustConfig()
    tinker: TinkerConfig = TinkerConfig()
    openai: OpenAiConfig = OpenAiConfig()
    tenants: TenantsConfig = TenantsConfig()
    server: ServerConfig = ServerConfig()
    gateways: GatewaysConfig = GatewaysConfig()
    dissemination: DisseminationConfig = DisseminationConfig()
    store: StoreConfig = StoreConfig()
    keeping: KeepingConfig = KeepingConfig()
    about: AboutConfig = AboutConfig()
    log: LogConfig = LogConfig()
    alerts: AlertsConfig = AlertsConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _works_for_somebody(self) -> HubConfig:
        if not self.trains and not self.serves_tenants:
            raise ValueError(
                'tinker.enabled or openai.enabled must be true with task.name = "none", or the hub has no work'
            )
        if not self.trains and self.run.mode != "async":
            raise ValueError('run.mode must be "async" with task.name = "none"')
        if self.serves_tenants and self.run.mode == "colocated" and self.tenants.drawn_by == "nodes":
            raise ValueError('tenants.drawn_by must be "hub" when run.mode = "colocated": there are no nodes')
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> HubConfig:
        self.evaluation.chosen(self.task)
        if self.run.mode == "sequential" and self.training.publish_every != 1:
            raise ValueError(
                'training.publish_every must be 1 when run.mode = "sequential": every step needs a new version'
            )
        if self.run.mode != "async" and self.training.on_new_version != "finish":
            raise ValueError(
                f'training.on_new_version must be "finish" when run.mode = "{self.run.mode}": '
                "no version is published there while completions are sampled"
            )
        if self.run.mode == "colocated" and self.evaluation.by == "nodes":
            raise ValueError('evaluation.by must be "hub" when run.mode = "colocated": there are no nodes')
        if self.run.mode == "async" and self.training.publish_every > self.training.max_staleness + 1:
            raise ValueError(
                "training.publish_every must be at most training.max_staleness + 1, or nothing is fresh enough"
            )
        if self.objective.reference == "start" and not self.model.start_from:
            raise ValueError('objective.reference must be "base" without model.start_from: that is what it starts with')
        if self.objective.overlong_buffer_tokens > self.sampling.max_tokens:
            raise ValueError("objective.overlong_buffer_tokens must be at most sampling.max_tokens")
        if self.training.tokens_per_step and self.objective.aggregation != "published":
            raise ValueError(
                "objective.aggregation must be left out with training.tokens_per_step, which the loss is divided by"
            )
        if self.objective.shuffle_batches % self.training.updates_per_step:
            raise ValueError(
                "objective.shuffle_batches must be a multiple of training.updates_per_step, so that each update gets "
                f"as many of them; got {self.objective.shuffle_batches} and {self.training.updates_per_step}"
            )
        if self.training.credit == "turn" and self.objective.selection != "all":
            raise ValueError(
                'objective.selection must be "all" with training.credit = "turn": it chooses whole rollouts by one '
                "advantage each"
            )
        if self.metrics.texts and not (self.keeping.share and self.keeping.max_bytes):
            raise ValueError("metrics.texts must be 0 when keeping.share or keeping.max_bytes is 0: no text is kept")
        learner = self.learner
        if learner.hosts > 1 and not learner.address:
            raise ValueError("learner.address must be HOST:PORT when learner.hosts is more than 1")
        if learner.processes * learner.hosts > 1 and learner.device not in ("auto", "cpu", "cuda"):
            raise ValueError(
                'learner.device must be "auto", "cpu" or "cuda" when there are several learner processes: '
                "each needs a separate GPU"
            )
        if self.dissemination.base == "model_hub" and self.model.base.startswith("builtin:"):
            raise ValueError('dissemination.base must be "swarm" when model.base is built in: no model hub has it')
        if self.cost.electricity_per_kwh and not self.cost.spend_cap_per_hour:
            raise ValueError(
                "cost.spend_cap_per_hour must be above 0 with cost.electricity_per_kwh, or no node works that says "
                "what power it draws"
            )
        return self

    @property
    def trains(self) -> bool:
        """True if the run has a task to train on. A run without one works only for tenants."""
        return bool(self.task.members)

    def check_trains(self) -> None:
        """Raise ConfigError if the run has no task to train on."""
        if not self.trains:
            raise ConfigError(
                "This run has no task of its own.",
                got=f'task.name = "{NO_TASK}"',
                do="Name a run with a task, or set task.name.",
            )

    @property
    def needs_nodes(self) -> bool:
        """True if nodes draw any of the run's samples."""
        if self.trains and self.run.mode != "colocated":
            return True
        return self.serves_tenants and self.tenants.drawn_by == "nodes"

    @property
    def serves_tenants(self) -> bool:
        """True if programs of other people may use the run's base model."""
        return self.tinker.enabled or self.openai.enabled

    @property
    def evaluation_sets(self) -> tuple[ChosenSet, ...]:
        """The run's evaluation sets, with their held-out problems."""
        return self.evaluation.chosen(self.task)
