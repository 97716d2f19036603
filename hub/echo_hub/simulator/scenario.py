"""The settings of a scenario: one frozen class per section.

Docstrings are also the comments of the example file that `echo_hub.simulator.scenario_file` writes, so every field has
one. Settings that a hub also has use the hub's names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from echo_shared.described import Described

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class ScenarioSection(Described):
    """Base class of all sections of a scenario."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class SimulatedRun(ScenarioSection):
    """Settings of the simulated run."""

    mode: Literal["colocated", "sequential", "async"] = "async"
    """The run's mode, as in a hub's config.toml. colocated: one node, which is the hub's own sampler."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of all randomness: the same scenario and seed give the same figures."""


class SimulatedTraining(ScenarioSection):
    """The training steps; each setting as in a hub's config.toml."""

    steps: Annotated[int, Field(ge=1)] = 40
    """Steps of the whole run."""
    groups_per_step: Annotated[int, Field(ge=1, le=4096)] = 64
    """Prompts in the batch of one step."""
    group_size: Annotated[int, Field(ge=2, le=1024)] = 8
    """Number of completions for one prompt."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 2
    """Async mode: greatest age in steps of a rollout when it is trained on."""
    publish_every: Annotated[int, Field(ge=1)] = 1
    """Number of training steps between published versions."""
    on_new_version: Literal["finish", "interrupt"] = "finish"
    """What a node does with unfinished completions when a newer version arrives. finish: completes them with the
    version that they began with. interrupt (async mode only): prefills the sampled tokens again and continues with the
    newer version; max_staleness limits the oldest token."""


class SimulatedLeases(ScenarioSection):
    """Leases of work to nodes; as in a hub's config.toml."""

    deadline_s: Positive = 120.0
    """Seconds after which a lease's unfinished rollouts are leased to other nodes, too."""


class SimulatedLearner(ScenarioSection):
    """Durations of the hub's own work."""

    step_s: Positive = 5.0
    """Seconds per training step, independent of its batch."""
    step_s_per_rollout: NotNegative = 0.0
    """Additional seconds per rollout of the batch."""
    step_jitter: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Standard deviation of the logarithm of a step's time."""
    handoff_s: NotNegative = 0.0
    """Seconds between the end of a step and the start of the next step, if that step is planned already."""
    score_s: NotNegative = 0.05
    """Seconds from a rollout's arrival to its reward."""
    prepare_s: NotNegative = 0.0
    """Seconds to sample and tokenise a problem."""


class SimulatedPublication(ScenarioSection):
    """Dissemination of versions. If at most `planned_nodes` are connected at the announcement, the hub's own planner
    decides which piece goes to which node and which nodes forward it, over simulated connections. If more are
    connected, or if the hub would choose the swarm, each node has the version after
        start_s + factor * max(payload / hub uplink, N payload / (hub uplink + all uplinks), payload / its downlink)
    with N nodes: the bound of Kumar and Ross for peer-assisted distribution, times a measured factor. The formula also
    applies to nodes that connect later.
    """

    export_s: NotNegative = 0.2
    """Seconds from the end of a step until the version is encoded, sealed and signed."""
    payload_bytes: NotNegative = 500_000.0
    """Bytes that a node receives for one version."""
    hub_uplink_bytes_s: Positive = 12.5e6
    """Uplink of the hub; 12.5e6 is 100 Mbit/s."""
    node_uplink_bytes_s: Positive = 2.5e6
    """Median uplink of the nodes."""
    uplink_sigma: Annotated[float, Field(ge=0, le=3)] = 0.0
    """Standard deviation of the logarithm of a node's uplink."""
    node_downlink_bytes_s: Positive = 12.5e6
    """Median downlink of the nodes."""
    downlink_sigma: Annotated[float, Field(ge=0, le=3)] = 0.0
    """Standard deviation of the logarithm of a node's downlink."""
    planned_nodes: Annotated[int, Field(ge=0, le=64)] = 64
    """Largest number of nodes for which the hub's planner is simulated; no hub links more than 64 nodes with each
    other. To simulate one version for 64 nodes takes 0.1 s of processor time with 0.5 MB, and 0.5 s with 8 MB. If all
    nodes together receive more than 64 MB, the formula is used. 0 = always the formula."""
    start_s: NotNegative = 0.3
    """Additional seconds in the formula. Measured with payloads of 0.5 MB: 0.1 to 0.3 s on clean links, 0.4 to 0.7 s on
    home links with 0.2 to 1 % packet loss; 1 s by the swarm, which more than 64 nodes use."""
    factor: Annotated[float, Field(ge=1)] = 1.1
    """Factor in the formula. Measured with 8 and 64 MB: 1.07 to 1.26 on clean links, 1.7 to 1.9 with 0.2 to 1 % of
    packets lost."""


class SimulatedNodes(ScenarioSection):
    """The simulated nodes. A node samples `width` rollouts at once and accepts twice as many."""

    count: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Number of honest nodes."""
    width: Annotated[int, Field(ge=1, le=2048)] = 4
    """Rollouts that a node samples at once."""
    s_per_token: Positive = 0.02
    """Seconds per token in each concurrent rollout, on the median node."""
    sigma: Annotated[float, Field(ge=0, le=3)] = 0.5
    """Standard deviation of the logarithm of a node's throughput."""
    slow_share: Share = 0.0
    """Share of nodes that are slower by `slow_factor`."""
    slow_factor: Annotated[float, Field(ge=1)] = 10.0
    """Factor by which the nodes of `slow_share` are slower."""
    prefill_s_per_token: NotNegative = 0.0
    """Seconds per prompt token on the median node, once per lease. Also applies to each token sampled earlier when a
    node continues a rollout, and to prompt and tokens when a node continues with a newer version."""
    swap_s: NotNegative = 0.1
    """Additional seconds without sampling before a node continues with a newer version."""
    delay_s: NotNegative = 0.05
    """Seconds that a message takes from hub to node, and from node to hub."""
    stream_s: NotNegative = 5.0
    """Interval in seconds at which a node sends the tokens of unfinished rollouts, as in its own settings; 0 = never.
    If another node gets the rollout later, it continues these tokens."""
    rented_share: Share = 0.0
    """Share of nodes that cost something."""
    price_per_hour: NotNegative = 0.0
    """Cost of a rented node in US dollars per hour, while connected and active."""


class SimulatedPrices(ScenarioSection):
    """Node prices, in addition to `nodes.rented_share` and its price, and the hub's cost settings, as in its
    config.toml."""

    per_1000_rollouts: NotNegative = 0.0
    """US dollars that the cheapest rented node asks per 1000 rollouts, at its full throughput; 0 = all ask for
    `nodes.price_per_hour`."""
    spread: Annotated[float, Field(ge=1, le=1000)] = 4.0
    """Highest price divided by the lowest; log-uniform in between, independent of a node's speed."""
    choose: bool = True
    """True: only the cheapest sufficient nodes are active. False: all are active and paid all the time."""
    spend_cap_per_hour: NotNegative = 1e9
    """Limit of the hourly cost of all active nodes together, in US dollars."""
    margin: Annotated[float, Field(ge=1, le=10)] = 1.15
    """Rollouts per step that active nodes should return in time, divided by the learner's demand."""
    dwell_s: NotNegative = 60.0
    """Shortest active time of a node, in seconds."""


class SimulatedLengths(ScenarioSection):
    """How long prompts and completions are: log-normal, cut off two standard deviations from the median."""

    tokens: Annotated[float, Field(ge=1, le=131_072)] = 100.0
    """Tokens of the median completion."""
    ratio: Annotated[float, Field(ge=1, le=10_000)] = 1.0
    """Longest divided by shortest completion; 1 = all have the median length."""
    prompt_share: Share = 0.7
    """Share of the logarithm's variance that belongs to the prompt; the rest differs between completions of a
    prompt."""
    prompts: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000
    """Number of different prompts; the groups go through them in turn."""
    prompt_tokens: Annotated[float, Field(ge=0)] = 100.0
    """Number of tokens in every prompt."""


class SimulatedAvailability(ScenarioSection):
    """When nodes are connected and available. A node whose day ends, or whose owner needs it, sends the tokens of its
    unfinished rollouts and gives them back."""

    on_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the day in which a node is connected; 1 = always."""
    day_s: Positive = 86_400.0
    """Length of a day in seconds."""
    begin_spread: Share = 1.0
    """Part of the day, from the start of the run, in which nodes connect; 1 = evenly over the day."""
    pauses_per_hour: NotNegative = 0.0
    """How often per hour the owner of a connected node needs the machine, on average."""
    pause_s: Positive = 600.0
    """Duration of a pause in seconds. The node stays connected and takes no work."""


class SimulatedSessions(ScenarioSection):
    """Episodes of several turns, each played by an environment with state (a session)."""

    slots: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    """Sessions that may be open at once; 0 = every episode is one completion, without a session."""
    turns: Annotated[int, Field(ge=1, le=1_000)] = 1
    """Turns of an episode, if there are sessions."""
    lost_share: Share = 0.0
    """Probability that a session is lost at a turn. The episode then starts again; its second loss ends it."""
    diverged_share: Share = 0.0
    """Probability that a session is rebuilt at a turn and answers an earlier turn otherwise. The turns after that one
    are dropped."""


class SimulatedFailures(ScenarioSection):
    """Nodes that vanish without notice, and come back."""

    per_hour: NotNegative = 0.0
    """Failures per hour of a connected node, on average."""
    away_s: Positive = 60.0
    """Seconds until a node that vanished comes back."""
    lost_share: Share = 0.5
    """Probability that the work of a node that vanishes is lost. Otherwise the node keeps sampling, and sends finished
    work when it is back."""


class SimulatedFalseClaims(ScenarioSection):
    """Nodes that claim a large capacity, a high speed and every version, and never return anything."""

    count: Annotated[int, Field(ge=0, le=100_000)] = 0
    """Number of nodes with false claims at any moment."""
    capacity: Annotated[int, Field(ge=1)] = 4096
    """Rollouts that each node with false claims says it accepts."""
    fresh_key_s: Positive = 60.0
    """Interval in seconds at which each node with false claims leaves and returns with a new key."""


class MeasuredSection(ScenarioSection):
    """How the figures are measured."""

    warm_up_steps: Annotated[int, Field(ge=0)] = 5
    """Number of first steps that do not count for utilisation and staleness."""
    limit_s: Positive = 1e6
    """Virtual seconds after which the simulation stops even if the run is not finished."""


class Scenario(BaseSettings):
    """All settings of a simulation."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", env_prefix="ECHO_SIMULATED_", env_nested_delimiter="__"
    )

    run: SimulatedRun = SimulatedRun()
    training: SimulatedTraining = SimulatedTraining()
    leases: SimulatedLeases = SimulatedLeases()
    learner: SimulatedLearner = SimulatedLearner()
    publication: SimulatedPublication = SimulatedPublication()
    nodes: SimulatedNodes = SimulatedNodes()
    prices: SimulatedPrices = SimulatedPrices()
    lengths: SimulatedLengths = SimulatedLengths()
    availability: SimulatedAvailability = SimulatedAvailability()
    sessions: SimulatedSessions = SimulatedSessions()
    failures: SimulatedFailures = SimulatedFailures()
    false_claims: SimulatedFalseClaims = SimulatedFalseClaims()
    measuring: MeasuredSection = MeasuredSection()

    @model_validator(mode="after")
    def _fits_together(self) -> Scenario:
        training = self.training
        if self.run.mode == "sequential" and training.publish_every != 1:
            raise ValueError(
                'training.publish_every must be 1 when run.mode = "sequential": every step samples with its own version'
            )
        if self.run.mode == "async" and training.publish_every > training.max_staleness + 1:
            raise ValueError(
                "training.publish_every must be at most training.max_staleness + 1, or nothing is fresh enough"
            )
        if self.run.mode != "async" and self.training.on_new_version != "finish":
            raise ValueError(
                f'training.on_new_version must be "finish" when run.mode = "{self.run.mode}": '
                "no version is published there while completions are sampled"
            )
        if self.run.mode == "colocated" and self.nodes.count != 1:
            raise ValueError('nodes.count must be 1 when run.mode = "colocated": the hub samples for itself')
        if self.measuring.warm_up_steps >= training.steps:
            raise ValueError("measuring.warm_up_steps must be less than training.steps")
        return self

    @property
    def rollouts_per_step(self) -> int:
        return self.training.groups_per_step * self.training.group_size
