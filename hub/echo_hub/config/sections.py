"""A run's settings, one frozen class a component; each component is given only its own section.

The docstrings are also the comments of the config.toml that `echo_hub.config.file` writes, so every field has one.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from echo_hub.config.about_section import AboutConfig
from echo_hub.config.objective_defaults import PUBLISHED, Advantage, Aggregation
from echo_hub.config.operation_sections import AlertsConfig, LogConfig, MetricsConfig
from echo_hub.config.section import Port, Section
from echo_hub.tasks.names import check_name
from echo_shared.artefacts import DELTA_REACH
from echo_shared.messages import MAX_BATCHED

Precision = Literal["auto", "float32", "bfloat16"]


class RunConfig(Section):
    """What this run is."""

    name: Annotated[str, Field(min_length=1, max_length=64)] = "echo"
    """Shown on the pages and to volunteers."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Every sub-seed is a hash of this one."""
    mode: Literal["colocated", "sequential", "async"] = "async"
    """colocated: the hub samples for itself. sequential: nodes sample, always from the newest version. async: nodes
    sample while the learner trains; the staleness bound is training.max_staleness."""


class ModelConfig(Section):
    """The base model."""

    base: str = "builtin:tiny"
    """`builtin:tiny`, a directory in Hugging Face layout, or an id on a model hub."""


class TaskConfig(Section):
    """Where problems and rewards come from."""

    name: Annotated[str, AfterValidator(check_name)] = "arithmetic"
    """arithmetic; reasoning-gym:DATASET with the name of any of its datasets; jsonl, with options.path;
    environment:guess, a game of several turns; or python:MODULE:FUNCTION, a function of yours that is given the options
    and returns a task or an environment."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Passed to the task as they are."""
    system_prompt: str = ""
    """Put before every problem: as the chat template's system turn, or as text where the base has no chat template."""
    prompt_suffix: str = ""
    """Put behind every problem's text as it is, to say what form an answer should have."""
    scorer_processes: Annotated[int, Field(ge=1, le=256)] = 2
    """Processes that scorers run in."""
    scorer_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """A scorer that takes longer is ended, and the rollout is dropped."""
    scorer_memory_mb: Annotated[int, Field(ge=64)] = 2048
    """What each of the processes may allocate while it scores; on Linux alone."""


class SamplingConfig(Section):
    """How nodes sample."""

    temperature: Annotated[float, Field(gt=0, le=10)] = 1.0
    """Of the softmax that tokens are drawn from, without top-k or top-p."""
    max_tokens: Annotated[int, Field(ge=1, le=131_072)] = 16
    """Tokens of a completion, the stop token included."""


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
    oldest."""
    tokens_per_step: Annotated[int, Field(ge=0)] = 0
    """A step takes complete groups, oldest first, until they have this many sampled tokens, and the loss is divided by
    this number, so that no step weighs more than another (C3PO). At least one group, at most groups_per_step; 0 = off:
    always groups_per_step."""
    dynamic_sampling: bool = False
    """A group whose rewards are all equal teaches nothing: it is dropped, and another one is sampled in its place
    (DAPO). After four batches of such groups in search of one step's, they are trained on as they are."""
    updates_per_step: Annotated[int, Field(ge=1, le=64)] = 1
    """Optimizer updates in one step, each on its share of the step's groups."""
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
    """Of the adapter on every linear layer."""
    lora_alpha: Annotated[int, Field(ge=1)] = 32
    """The adapter is scaled by lora_alpha / lora_rank."""


class ObjectiveConfig(Section):
    """What a step minimises (docs/learner.md). Where a number is 0 or a choice is "published", the objective's own
    paper decides."""

    name: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "aipo", "decoupled_ppo", "two_sided"] = "two_sided"
    """The loss of a token, given its importance ratio and its advantage. With grpo, dr_grpo, dapo and gspo a single
    token may outweigh a whole step, if who drew it claims that it was nearly impossible."""
    clip_low: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The ratio is clipped at 1 - clip_low below. Not for cispo and aipo."""
    clip_high: Annotated[float, Field(ge=0)] = 0.0
    """The ratio is clipped at 1 + clip_high above. Not for cispo and aipo."""
    cap: Annotated[float, Field(ge=0)] = 0.0
    """Largest ratio, at least 1: cispo's and aipo's weight of a token; decoupled_ppo's between the proximal and the
    behaviour policy, more than 1, beyond which a token is left out; two_sided's delta, more than 1 + clip_high."""
    aggregation: Literal["published", "token_mean", "sequence_mean", "group_mean", "constant"] = "published"
    """How the losses of a step's tokens become one: mean over all tokens, over rollouts of their means, over groups of
    their token means, or the sum over a constant (rollouts times sampling.max_tokens)."""
    advantage: Literal["published", "mean", "mean_std", "batch_std", "leave_one_out"] = "published"
    """A rollout's reward less its group's mean, as it is, over the group's or the whole step's standard deviation; or
    less the mean of the group's others."""
    old_policy: Literal["behavior", "proximal"] = "behavior"
    """What the ratio is taken against: the engine's log-probabilities of the version that sampled, or the learner's own
    at the start of the step. aipo's and decoupled_ppo's formulas say it themselves."""
    correction: Literal["none", "tis", "masked_is"] = "none"
    """With old_policy = "proximal", what a token's loss is multiplied by: 1, or the ratio between the proximal and the
    behaviour policy, truncated at correction_high, or 0 instead of it outside correction_low .. correction_high."""
    correction_low: Annotated[float, Field(ge=0, le=1)] = 0.5
    """masked_is only."""
    correction_high: Annotated[float, Field(ge=1)] = 2.0
    """tis and masked_is."""
    sequence_veto: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """A rollout with a token whose ratio between the learner at the start of the step and the behaviour policy is below
    this is left out; 0 = off. 1e-4 is usual."""
    kl_coefficient: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the divergence from the base model; costs a second forward pass. A token that the base finds more than
    e^3 times likelier pulls no harder than one at that bound."""
    overlong: Literal["keep", "mask", "penalty"] = "keep"
    """Completions (with an environment: any turn) that were cut off at sampling.max_tokens: trained on as they are; or
    left out of the loss and of its denominator; or, like all of nearly that length (of several turns the last one's),
    with a reward that is the smaller the longer they are, down to one less (DAPO)."""
    overlong_buffer_tokens: Annotated[int, Field(ge=0)] = 0
    """With overlong = "penalty": how many tokens before the limit the penalty begins."""
    selection: Literal["all", "shuffle_r1"] = "all"
    """Which rollouts of a group are trained on: all, or the most unlike pairs by advantage, half of them."""

    @property
    def chosen_aggregation(self) -> Aggregation:
        """The paper's own where the setting is "published"."""
        return PUBLISHED[self.name].aggregation if self.aggregation == "published" else self.aggregation

    @property
    def chosen_advantage(self) -> Advantage:
        """The paper's own where the setting is "published"."""
        return PUBLISHED[self.name].advantage if self.advantage == "published" else self.advantage

    def resolved(self) -> ObjectiveConfig:
        """These settings with the paper's own choices and numbers in place of "published" and 0."""
        paper = PUBLISHED[self.name]
        return self.model_copy(
            update={
                **{name: getattr(self, name) or number for name, number in paper.numbers.items()},
                "aggregation": self.chosen_aggregation,
                "advantage": self.chosen_advantage,
            }
        )

    @model_validator(mode="after")
    def _fits_together(self) -> ObjectiveConfig:
        paper = PUBLISHED[self.name]
        unused = [
            name for name in ("clip_low", "clip_high", "cap") if getattr(self, name) and name not in paper.numbers
        ]
        if unused:
            raise ValueError(f"{self.name} does not use {', '.join(unused)}: remove the line, or set it to 0")
        if self.old_policy == "proximal" and not paper.takes_old_policy:
            raise ValueError(f"{self.name} says itself what its ratios are taken against: remove old_policy")
        resolved = self.resolved()
        # The ratio of a token that nothing has moved is 1, but for rounding.
        if "cap" in paper.numbers and (resolved.cap < 1 or (self.name == "decoupled_ppo" and resolved.cap == 1)):
            least = "cap > 1" if self.name == "decoupled_ppo" else "cap >= 1"
            raise ValueError(f"{self.name} needs {least}, got {resolved.cap}")
        if self.name == "two_sided" and resolved.cap <= 1 + resolved.clip_high:
            raise ValueError(f"two_sided needs cap > 1 + clip_high, got {resolved.cap} and {resolved.clip_high}")
        if self.correction != "none" and self.old_policy != "proximal":
            raise ValueError('correction needs old_policy = "proximal": the ratio to "behavior" corrects already')
        used = {"none": (), "tis": ("correction_high",), "masked_is": ("correction_low", "correction_high")}
        for name in ("correction_low", "correction_high"):
            default = type(self).model_fields[name].default
            if getattr(self, name) != default and name not in used[self.correction]:
                raise ValueError(f'correction = "{self.correction}" does not use {name}: remove the line')
        if (self.overlong == "penalty") != (self.overlong_buffer_tokens > 0):
            raise ValueError('overlong = "penalty" and overlong_buffer_tokens > 0 need each other')
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
    micro_batch_tokens: Annotated[int, Field(ge=64)] = 16_384
    """Tokens of one forward and backward pass, a prompt counted once for each of its rollouts."""
    gradient_checkpointing: bool = False
    """Keeps only each layer's input for the backward pass: far less memory, a third to a half more time."""
    offload_optimizer: bool = True
    """Co-located mode, on a GPU: the optimizer's state is in the host's memory while the learner samples."""
    deterministic: bool = True
    """A step that is trained again gives the very same adapter. Off, some of CUDA's kernels are faster."""
    checkpoint_every: Annotated[int, Field(ge=1)] = 1
    """Steps between checkpoints; a killed learner repeats the steps since the last one."""
    checkpoints_kept: Annotated[int, Field(ge=1)] = 3
    """Older checkpoints are removed; published versions stay."""
    checkpoint_milestones: Annotated[int, Field(ge=0)] = 0
    """Checkpoints of the steps that this divides are never removed; 0 = none is kept for ever."""
    adapters_kept: Annotated[int, Field(ge=1)] = 200
    """Newest published adapters that stay in RUN/adapters, for `echo-hub export` and `echo-hub eval`."""


class EvaluationConfig(Section):
    """How well a version does on problems that are never trained on."""

    problems: Annotated[int, Field(ge=1, le=100_000)] = 256
    """Held-out problems, disjoint from all training problems."""
    every: Annotated[int, Field(ge=0)] = 0
    """Versions between evaluations; 0 = only the base and the last version."""
    samples: Annotated[int, Field(ge=0, le=1024)] = 0
    """Completions of each problem at the run's temperature, for mean@k, beside the greedy one; 0 = none."""
    by: Literal["hub", "nodes"] = "hub"
    """Who generates: hub is the learner's own device, between two steps; nodes do it as leased work, for at most a
    quarter of what is leased while training wants it. After the last step the hub takes over if no node works any
    more."""


class LeaseConfig(Section):
    """How work is handed out."""

    deadline_s: Annotated[float, Field(gt=0)] = 120.0
    """A lease older than this is given to another node as well; the first valid result wins. Where it is known how long
    a node takes, others are asked sooner."""
    first_window: Annotated[int, Field(ge=1, le=MAX_BATCHED)] = 4
    """Rollouts that a node may hold that has returned none yet while no other has; else it may hold one. What it claims
    beyond that it earns: one more with each that comes back in time, one less with each that does not."""


class CostConfig(Section):
    """What nodes may cost. Each says what it asks for an hour; gifts ask for nothing and always work. Of the others,
    the cheapest by what a rollout costs work, as many as keep the learner busy; the rest stand by, ready. The hub keeps
    the account, and pays nobody by itself."""

    spend_cap_per_hour: Annotated[float, Field(ge=0, le=1e9)] = 0.0
    """US dollars that all working nodes together may cost in an hour; 0 = gifts alone work. Until the first step is
    trained nobody knows how many it takes, and all that the cap has room for work."""
    electricity_per_kwh: Annotated[float, Field(ge=0, le=100)] = 0.0
    """Adds this price, in US dollars, of the power that a node says it draws to what it asks for; 0 = its power costs
    you nothing."""
    margin: Annotated[float, Field(ge=1, le=10)] = 1.15
    """Rollouts that working nodes bring back in time, over those that the learner takes."""
    hysteresis: Annotated[float, Field(ge=0, le=0.5)] = 0.05
    """More nodes set to work when the margin has shrunk by this share; others take their place only if that saves this
    share of the cost."""
    dwell_s: Annotated[float, Field(ge=0, le=86_400)] = 60.0
    """A node that has set to work goes on for this long at least, unless it is lost or fails."""


class TrustConfig(Section):
    """How the hub finds out who draws as it was asked to."""

    verifier: Literal["process", "nodes", "off"] = "process"
    """Who re-computes rollouts under the version that they name: process is one beside the learner, of low priority and
    with the base model in memory a second time; nodes: nodes that are proven re-compute those of others, which takes
    three machines of different owners at least; off: nobody does."""
    verifier_device: Annotated[str, Field(pattern=r"^(auto|cpu|mps|cuda(:\d+)?)$")] = "auto"
    """Where it computes: auto, cpu, cuda, cuda:1, mps. It may be the learner's, if the base model fits there twice."""
    verifier_threads: Annotated[int, Field(ge=1, le=1024)] = 1
    """CPU threads of the verifier."""
    least_checked: Annotated[float, Field(ge=0, le=1)] = 0.03
    """Of a proven node's rollouts, this share is checked in the long run."""
    first_checked: Annotated[int, Field(ge=1, le=4096)] = 64
    """At least so many of a node's first rollouts are all checked, before anybody trains on them; after that a share
    that falls as it goes on being honest, to half by the time that twice as many were, down to least_checked. Rollouts
    of 128 tokens and more count for several, those of 512 and more for eight."""
    false_alarm: Annotated[float, Field(gt=0, le=0.01)] = 1e-6
    """An honest node is quarantined no oftener than once in the reciprocal of this, counted in its checked rollouts."""
    miss: Annotated[float, Field(gt=0, le=0.1)] = 1e-3
    """A node that forges a fifth of its tokens becomes a proven one with at most this probability."""


class ServerConfig(Section):
    """What the hub listens on, and who may join."""

    host: str = "127.0.0.1"
    """0.0.0.0 to let other machines in; over the internet with TLS, here or by a proxy in front."""
    port: Port = 8710
    """The only TCP port that nodes and browsers need."""
    public_url: Annotated[str, Field(pattern=r"^(https?://[^/]+.*)?$")] = ""
    """The address that nodes use, if it is not http://host:port (a proxy's, for example)."""
    trusted_proxies: tuple[str, ...] = ()
    """Addresses of proxies in front of the hub: what they say in X-Forwarded-For is taken for the client's address."""
    tls_certificate: str = ""
    """A PEM file with the certificate and its chain: the port then speaks TLS (https, wss). A new one is taken over."""
    tls_key: str = ""
    """The PEM file with its private key, which has no password."""
    swarm_port: Port = 0
    """BitTorrent port of the hub's own peer; 0 = any free one."""
    shared_memory: bool = True
    """Nodes on the hub's own host, run by the hub's own user, read new versions from memory, without the swarm (on
    Linux). From the first connection of such a node on, the hub holds the newest two adapters in memory for it."""
    join: Literal["open", "invite"] = "open"
    """open: anyone. invite: whoever comes by an invite (echo-hub invite), or has one of the invite_tokens."""
    install_from: str = ""
    """A directory that `make wheelhouse` made, dist/serve: the hub then serves it, and its pages show the one line that
    installs from it and joins. Volunteers run what is in there: they trust you with that. Empty: nothing is served."""
    invite_tokens: tuple[Annotated[str, Field(min_length=8, max_length=256)], ...] = ()
    """With join = "invite": any one of these lets any number of nodes in. At least 8 characters each."""
    heartbeat_s: Annotated[float, Field(gt=0, le=600)] = 5.0
    """Nodes report this often."""
    joins_per_s: Annotated[float, Field(ge=0.01, le=10_000)] = 50.0
    """Nodes that the hub takes in each second. Others wait for their turn: those whose work was of use before go first,
    and addresses take turns."""
    connections_per_s: Annotated[float, Field(ge=1, le=1_000_000)] = 1_000.0
    """New connections that the hub takes each second, and after a while without any four times as many at once, as for
    the next three. Connections from trusted_proxies do not count."""
    connections_per_s_per_address: Annotated[float, Field(ge=1, le=1_000_000)] = 250.0
    """Of them from one address; of IPv6, from one /64."""
    requests_per_s: Annotated[float, Field(ge=1, le=1_000_000)] = 2_000.0
    """HTTP requests that the hub answers each second, but for those for files by nodes that have joined."""
    requests_per_s_per_address: Annotated[float, Field(ge=1, le=1_000_000)] = 500.0
    """Of them for one address, behind a proxy in trusted_proxies too."""
    max_connections: Annotated[int, Field(ge=16, le=1_000_000)] = 10_000
    """Open at once, of nodes and browsers together. Nodes that are neither invited nor were of use before find no room
    once nodes have three quarters of them. The hub raises its own limit of open files for as many, as far as the system
    lets it."""
    max_strangers: Annotated[int, Field(ge=8, le=1_000_000)] = 2_000
    """Of them, those that have not shown that they are a node's: browsers, and whoever else reaches the port."""
    max_strangers_per_address: Annotated[int, Field(ge=4, le=1_000_000)] = 1_024
    """Of these from one address; of IPv6, from one /64. For one too many, the oldest that has not sent its request is
    closed, else the one that has been reading its answer for longest, else the newest. Nodes that reach the hub from
    behind one NAT or proxy share this."""
    max_nodes_per_address: Annotated[int, Field(ge=1, le=1_000_000)] = 2_000
    """Connections of nodes from one address. More nodes than that behind one NAT need more; a proxy in front of the hub
    belongs into trusted_proxies, so that its clients' addresses count."""

    @model_validator(mode="after")
    def _has_both_or_neither(self) -> ServerConfig:
        if bool(self.tls_certificate) != bool(self.tls_key):
            raise ValueError("tls_certificate and tls_key belong together: set both, or neither")
        return self


class DisseminationConfig(Section):
    """How the base model and every new version get to the nodes."""

    way: Literal["auto", "inline", "broadcast", "swarm", "web_seed"] = "auto"
    """inline: the hub sends a new version to each node. broadcast: it sends every part to one node, which hands it on
    to the others. swarm: BitTorrent. web_seed: HTTP from the hub. auto: for each version what is likely the soonest.
    Where a way fails, a node turns to the swarm, then to the web seed."""
    base: Literal["swarm", "model_hub"] = "swarm"
    """Where nodes get the base model: from the hub and each other, or from the model hub that model.base is an id on.
    The files are checked either way, and a node that cannot reach the model hub turns to the swarm."""
    precision: Precision = "auto"
    """Of adapters as they are published, and as the hub itself samples from them; training goes on from float32. auto:
    bfloat16 where the learner computes in it (learner.precision), which loses nothing, for then it rounds the adapter
    too; else float32. bfloat16 makes a version 4.5 to 6 times smaller as a difference from the one before, 2.4 times
    whole; beside a learner in float32 it puts the sampling policy off by a KL of 1e-10 to 2e-8. May be changed between
    two starts."""
    delta_reach: Annotated[int, Field(ge=0, le=DELTA_REACH)] = DELTA_REACH
    """A version travels as its difference from one that the nodes have, where that is smaller: one of this many
    versions published before it. 0 = always whole."""
    uplink_mbit_s: Annotated[float, Field(ge=0)] = 0.0
    """What the hub can send to all nodes together; 0 = measured."""


class StoreConfig(Section):
    """Where rollouts and receipts are kept."""

    url: str = ""
    """An SQLAlchemy URL; empty = SQLite in the run directory."""


class KeepingConfig(Section):
    """What is kept of completions for the operator to read, once the hub itself does not need them any more. Receipts,
    rewards and times are kept of all, for ever. May be changed between two starts."""

    share: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of all groups, those whose completions are kept, with their log-probabilities: 1 = all, 0 = none."""
    max_bytes: Annotated[int, Field(ge=0)] = 500_000_000
    """How much of them is kept, in the store: about 8 bytes a token. Above it the oldest are deleted."""


class HubConfig(BaseSettings):
    """All sections."""

    model_config = SettingsConfigDict(frozen=True, extra="forbid", env_prefix="ECHO_HUB_", env_nested_delimiter="__")

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    sampling: SamplingConfig = SamplingConfig()
    training: TrainingConfig = TrainingConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    leases: LeaseConfig = LeaseConfig()
    cost: CostConfig = CostConfig()
    trust: TrustConfig = TrustConfig()
    server: ServerConfig = ServerConfig()
    dissemination: DisseminationConfig = DisseminationConfig()
    store: StoreConfig = StoreConfig()
    keeping: KeepingConfig = KeepingConfig()
    about: AboutConfig = AboutConfig()
    log: LogConfig = LogConfig()
    alerts: AlertsConfig = AlertsConfig()
    metrics: MetricsConfig = MetricsConfig()

    @model_validator(mode="after")
    def _fits_together(self) -> HubConfig:
        if self.run.mode == "sequential" and self.training.publish_every != 1:
            raise ValueError('training.publish_every must be 1 when run.mode = "sequential": every step samples anew')
        if self.run.mode != "async" and self.training.on_new_version != "finish":
            raise ValueError(
                f'training.on_new_version must be "finish" when run.mode = "{self.run.mode}": '
                "no version is published there while completions are drawn"
            )
        if self.run.mode == "colocated" and self.evaluation.by == "nodes":
            raise ValueError('evaluation.by must be "hub" when run.mode = "colocated": there are no nodes')
        if self.run.mode == "async" and self.training.publish_every > self.training.max_staleness + 1:
            raise ValueError(
                "training.publish_every must be at most training.max_staleness + 1, or nothing is fresh enough"
            )
        if self.objective.overlong_buffer_tokens > self.sampling.max_tokens:
            raise ValueError("objective.overlong_buffer_tokens must be at most sampling.max_tokens")
        if self.training.tokens_per_step and self.objective.aggregation != "published":
            raise ValueError(
                "objective.aggregation must be left out with training.tokens_per_step, which the loss is divided by"
            )
        if self.metrics.texts and not (self.keeping.share and self.keeping.max_bytes):
            raise ValueError("metrics.texts must be 0 when keeping.share or keeping.max_bytes is 0: no text is kept")
        learner = self.learner
        if learner.hosts > 1 and not learner.address:
            raise ValueError("learner.address must be HOST:PORT when learner.hosts is more than 1")
        if learner.processes * learner.hosts > 1 and learner.device not in ("auto", "cpu", "cuda"):
            raise ValueError(
                'learner.device must be "auto", "cpu" or "cuda" when there are several learner processes: '
                "each takes a GPU of its own"
            )
        if self.dissemination.base == "model_hub" and self.model.base.startswith("builtin:"):
            raise ValueError('dissemination.base must be "swarm" when model.base is built in: no model hub has it')
        if self.cost.electricity_per_kwh and not self.cost.spend_cap_per_hour:
            raise ValueError(
                "cost.spend_cap_per_hour must be above 0 with cost.electricity_per_kwh, or no node works that says "
                "what power it draws"
            )
        return self
