"""What is simulated: one frozen class a section, each with its own settings.

The docstrings are also the comments of the example that `echo_hub.simulator.scenario_file` writes, so every field has
one. Settings that a hub has as well have the hub's names.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]


class ScenarioSection(BaseModel):
    """What all sections have in common."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


class SimulatedRun(ScenarioSection):
    """The run."""

    mode: Literal["colocated", "sequential", "async"] = "async"
    """As in a hub's config.toml. Co-located: one node, which is the hub's own sampler."""
    seed: Annotated[int, Field(ge=0)] = 0
    """All chance follows from it: the same scenario with the same seed gives the same figures."""


class SimulatedTraining(ScenarioSection):
    """The steps; each setting as in a hub's config.toml."""

    steps: Annotated[int, Field(ge=1)] = 40
    """Steps of the whole run."""
    groups_per_step: Annotated[int, Field(ge=1, le=4096)] = 64
    """Prompts in the batch of one step."""
    group_size: Annotated[int, Field(ge=2, le=1024)] = 8
    """Completions of one prompt."""
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 2
    """Async mode: how many steps old a rollout may be when it is trained on."""
    publish_every: Annotated[int, Field(ge=1)] = 1
    """Steps between published versions."""
    on_new_version: Literal["finish", "interrupt"] = "finish"
    """What a node does with the completions that it is drawing when a newer version has reached it. finish: draws them
    to their end by the version that they began with. interrupt (async mode only): goes on in mid-completion by the
    newer one, once it has read again what is there; max_staleness holds for the oldest token."""


class SimulatedLeases(ScenarioSection):
    """Work that is given to nodes; as in a hub's config.toml."""

    deadline_s: Positive = 120.0
    """A lease older than this is given to another node as well."""


class SimulatedLearner(ScenarioSection):
    """How long the hub's own work takes."""

    step_s: Positive = 5.0
    """One training step, whatever its batch."""
    step_s_per_rollout: NotNegative = 0.0
    """What each rollout of the batch adds to it."""
    step_jitter: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Standard deviation of the logarithm of a step's time."""
    handoff_s: NotNegative = 0.0
    """From the end of a step to the beginning of the next, if that is planned at once."""
    score_s: NotNegative = 0.05
    """From a rollout's arrival to its reward."""
    prepare_s: NotNegative = 0.0
    """To sample and tokenise a problem."""


class SimulatedPublication(ScenarioSection):
    """How a version reaches the nodes. Where no more than `planned_nodes` are connected at its announcement, the hub's
    own planner says which piece goes to whom, and who hands it on; the pieces go over simulated lines. Where more are,
    and where the hub would choose the swarm, each node has it after

        start_s + factor * max(payload / hub uplink, N payload / (hub uplink + all uplinks), payload / its downlink)

    with N nodes: the bound of Kumar and Ross for peer-assisted distribution, and what is measured beyond it. So does
    who comes later."""

    export_s: NotNegative = 0.2
    """From the end of a step until the version is encoded, sealed and signed."""
    payload_bytes: NotNegative = 500_000.0
    """What a node receives of one version."""
    hub_uplink_bytes_s: Positive = 12.5e6
    """12.5e6 is 100 Mbit/s."""
    node_uplink_bytes_s: Positive = 2.5e6
    """The median of the nodes'."""
    uplink_sigma: Annotated[float, Field(ge=0, le=3)] = 0.0
    """Standard deviation of the logarithm of a node's uplink."""
    node_downlink_bytes_s: Positive = 12.5e6
    """The median of the nodes'."""
    downlink_sigma: Annotated[float, Field(ge=0, le=3)] = 0.0
    """Standard deviation of the logarithm of a node's downlink."""
    planned_nodes: Annotated[int, Field(ge=0, le=64)] = 64
    """No hub links more than 64 nodes with each other. A version for 64 of them takes a tenth of a second of processor
    time with 0.5 MB, and half a second with 8 MB; more than 64 MB to all of them go by the formula. 0: all does."""
    start_s: NotNegative = 0.3
    """Measured over the bound with payloads of 0.5 MB: 0.1 to 0.3 s on clean links, 0.4 to 0.7 s on homes' links with
    0.2 to 1 % of packets lost; by the swarm, which more than 64 nodes take, a second."""
    factor: Annotated[float, Field(ge=1)] = 1.1
    """Measured with 8 and 64 MB: 1.07 to 1.26 on clean links, 1.7 to 1.9 with 0.2 to 1 % of packets lost."""


class SimulatedNodes(ScenarioSection):
    """The pool. A node samples `width` rollouts at once and is willing to hold twice as many."""

    count: Annotated[int, Field(ge=1, le=1_000_000)] = 100
    """Honest nodes."""
    width: Annotated[int, Field(ge=1, le=2048)] = 4
    """Rollouts that a node samples at once."""
    s_per_token: Positive = 0.02
    """Seconds a token takes in each of these, on the median node."""
    sigma: Annotated[float, Field(ge=0, le=3)] = 0.5
    """Standard deviation of the logarithm of a node's throughput."""
    slow_share: Share = 0.0
    """Nodes that are slower still."""
    slow_factor: Annotated[float, Field(ge=1)] = 10.0
    """How many times as long they take."""
    prefill_s_per_token: NotNegative = 0.0
    """Seconds a prompt's token takes on the median node, once for each lease; and a token that another node has drawn,
    for who goes on with it; and all of these again, where a node goes on by a newer version."""
    swap_s: NotNegative = 0.1
    """Besides, seconds in which a node draws nothing before it goes on by a newer version in mid-completion."""
    delay_s: NotNegative = 0.05
    """From hub to node, and from node to hub."""
    stream_s: NotNegative = 5.0
    """So often a node sends what its unfinished rollouts have drawn, as in its own settings; 0 = never. Who is given
    such a rollout afterwards goes on with it."""
    rented_share: Share = 0.0
    """Nodes that cost something."""
    price_per_hour: NotNegative = 0.0
    """US dollars that a rented node costs in an hour, as long as it is connected and active."""


class SimulatedPrices(ScenarioSection):
    """What nodes cost, beside `nodes.rented_share` and its price, and what the hub does about it; as in a hub's
    config.toml."""

    per_1000_rollouts: NotNegative = 0.0
    """US dollars that a rented node asks for as many rollouts as it can sample, of the cheapest one; 0 = all ask for
    `nodes.price_per_hour`."""
    spread: Annotated[float, Field(ge=1, le=1000)] = 4.0
    """What the dearest asks over what the cheapest does; log-uniform between them, whatever their pace."""
    choose: bool = True
    """The cheapest that suffice are active. False: all are, and are paid, all the time."""
    spend_cap_per_hour: NotNegative = 1e9
    """What all active nodes together may cost."""
    margin: Annotated[float, Field(ge=1, le=10)] = 1.15
    """What active nodes bring in time, over what the learner takes."""
    dwell_s: NotNegative = 60.0
    """So long a node is active at least."""


class SimulatedLengths(ScenarioSection):
    """How long prompts and completions are: log-normal, cut off two standard deviations from the median."""

    tokens: Annotated[float, Field(ge=1, le=131_072)] = 100.0
    """Of the median completion."""
    ratio: Annotated[float, Field(ge=1, le=10_000)] = 1.0
    """The longest over the shortest; 1 = all are as long as the median."""
    prompt_share: Share = 0.7
    """How much of the logarithm's variance is the prompt's own: the rest differs between completions of one prompt."""
    prompts: Annotated[int, Field(ge=1, le=1_000_000)] = 1_000
    """Different prompts; then they come round again."""
    prompt_tokens: Annotated[float, Field(ge=0)] = 100.0
    """Of every prompt."""


class SimulatedAvailability(ScenarioSection):
    """When nodes are there, and lent. One whose time is up, or whose owner wants it, sends what its unfinished rollouts
    have drawn and gives them back."""

    on_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Of the day that a node is on; 1 = always."""
    day_s: Positive = 86_400.0
    """How long a day is."""
    begin_spread: Share = 1.0
    """The part of the day in which nodes come on, with which the run begins; 1 = as likely at any moment."""
    pauses_per_hour: NotNegative = 0.0
    """How often the owner of a node that is on wants the machine for himself, on average."""
    pause_s: Positive = 600.0
    """For how long. The node stays connected, and takes no work."""


class SimulatedFailures(ScenarioSection):
    """Nodes that vanish without a word, and come back."""

    per_hour: NotNegative = 0.0
    """How often that happens to a node that is connected, on average."""
    away_s: Positive = 60.0
    """For how long."""
    lost_share: Share = 0.5
    """How often what it held is lost. Else it samples on, and sends what it has finished once it is back."""


class SimulatedFalseClaims(ScenarioSection):
    """Nodes that claim to hold much, have every version at once, and never return anything."""

    count: Annotated[int, Field(ge=0, le=100_000)] = 0
    """At any moment."""
    capacity: Annotated[int, Field(ge=1)] = 4096
    """Rollouts that each claims to be willing to hold."""
    fresh_key_s: Positive = 60.0
    """So often each leaves and comes back as a node that nobody knows."""


class Measuring(ScenarioSection):
    """What the figures are taken of."""

    warm_up_steps: Annotated[int, Field(ge=0)] = 5
    """Steps before the learner's utilisation and the staleness of what it consumes count."""
    limit_s: Positive = 1e6
    """Virtual time after which a run that is not finished is given up."""


class Scenario(BaseSettings):
    """All sections."""

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
    failures: SimulatedFailures = SimulatedFailures()
    false_claims: SimulatedFalseClaims = SimulatedFalseClaims()
    measuring: Measuring = Measuring()

    @model_validator(mode="after")
    def _fits_together(self) -> Scenario:
        training = self.training
        if self.run.mode == "sequential" and training.publish_every != 1:
            raise ValueError('training.publish_every must be 1 when run.mode = "sequential": every step samples anew')
        if self.run.mode == "async" and training.publish_every > training.max_staleness + 1:
            raise ValueError(
                "training.publish_every must be at most training.max_staleness + 1, or nothing is fresh enough"
            )
        if self.run.mode != "async" and self.training.on_new_version != "finish":
            raise ValueError(
                f'training.on_new_version must be "finish" when run.mode = "{self.run.mode}": '
                "no version is published there while completions are drawn"
            )
        if self.run.mode == "colocated" and self.nodes.count != 1:
            raise ValueError('nodes.count must be 1 when run.mode = "colocated": the hub samples for itself')
        if self.measuring.warm_up_steps >= training.steps:
            raise ValueError("measuring.warm_up_steps must be less than training.steps")
        return self

    @property
    def rollouts_per_step(self) -> int:
        return self.training.groups_per_step * self.training.group_size
