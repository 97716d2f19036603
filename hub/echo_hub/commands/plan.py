"""`echo-hub plan`: apply the capacity model to a run's measurements, or to a fleet described in a file."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from echo_hub.config.scoring_sections import WorkerKind
from echo_hub.config.sections import HubConfig
from echo_hub.core.capacity.advice import Advice, Mix, Placement, advise, cheapest_to_add, place, times_as_many
from echo_hub.core.capacity.model import Mode, NodeClass, Pool, Prediction, Workload
from echo_hub.core.capacity.schedule import predict
from echo_hub.dashboard.formats import display_name
from echo_hub.scoring.processes import where
from echo_hub.store.database import read_meta
from echo_hub.store.store import Store
from echo_hub.views.capacity import verdict
from echo_hub.views.learner_time import LearnerTime, learner_time
from echo_hub.views.pace import kinds_of, newest_steps, read_pace
from echo_shared.errors import ConfigError

EXAMPLE: Final = """\
# A fleet for `echo-hub plan --file`: the cost of a step, and the nodes that sample.
mode = "async"              # colocated (the nodes are the hub's own sampler), sequential or async
rollouts_per_step = 512
train_s = 20.0              # seconds of training per step
hand_off_s = 0.5            # seconds of a step besides training
broadcast_s = 6.0           # seconds from a version's training until nodes have it
max_staleness = 2
publish_every = 1           # steps between published versions

[[nodes]]
name = "laptop"
count = 20
rollouts_per_s = 0.6        # of one node while it has work
latency_s = 14.0            # seconds from lease to receipt: 90th percentile
cost_per_h = 0.0            # of one node; 0 = free

[[nodes]]
name = "rented GPU"
count = 2
rollouts_per_s = 4.0
latency_s = 6.0
cost_per_h = 0.45
"""

_Seconds = Annotated[float, Field(ge=0, le=1e7)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class NodesEntry(_Part):
    """One [[nodes]] entry of a fleet file: a class of nodes."""

    name: Annotated[str, Field(min_length=1, max_length=200)]
    count: Annotated[int, Field(ge=0, le=1_000_000)]
    rollouts_per_s: Annotated[float, Field(gt=0, le=1e6)]
    latency_s: _Seconds
    cost_per_h: Annotated[float, Field(ge=0, le=1e6)] = 0.0


class FleetFile(_Part):
    """A file that describes a fleet for `echo-hub plan`."""

    mode: Mode = "async"
    rollouts_per_step: Annotated[float, Field(gt=0, le=1e9)]
    train_s: Annotated[float, Field(gt=0, le=1e7)]
    hand_off_s: _Seconds = 0.0
    broadcast_s: _Seconds = 0.0
    max_staleness: Annotated[int, Field(ge=0, le=1000)] = 0
    publish_every: Annotated[int, Field(ge=1, le=1001)] = 1
    nodes: tuple[NodesEntry, ...] = ()

    @model_validator(mode="after")
    def _kinds_are_told_apart(self) -> FleetFile:
        if not self.nodes:
            raise ValueError("there is no [[nodes]] entry: list the nodes that sample, or could (count = 0)")
        if len({display_name(entry.name) for entry in self.nodes}) < len(self.nodes):
            raise ValueError("each [[nodes]] entry needs a unique name")
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFleet:
    """The fleet for which to plan. `nodes` are the nodes that sample now; `kinds` are the classes of nodes that could
    be added."""

    workload: Workload
    nodes: tuple[NodeClass, ...]
    kinds: tuple[NodeClass, ...]
    scoring: str = ""
    """Where scorers run, in words; "" for a fleet from a file."""
    verifying: str = ""
    """Where the verifier runs, in words; "" for a fleet from a file."""
    evaluating: str = ""
    """Where the samples of evaluations are drawn, in words; "" for a fleet from a file."""
    spent: LearnerTime | None = None
    """How the learner spent its recent time; None for a fleet from a file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    fleet: PlannedFleet
    target: float
    prediction: Prediction
    advice: Advice
    cheapest: Mix | None
    """The cheapest nodes to add so that the learner reaches the target utilisation, of one or two kinds; None if no
    addition reaches it."""
    times_as_many: float | None
    """Factor by which the number of present nodes must grow so that the learner reaches the target utilisation; None if
    no factor is enough."""
    placement: Placement | None
    """The cheapest subset of the present nodes with which the learner reaches the target utilisation, and its
    settings."""
    verdict: str

    def as_json(self) -> dict[str, Any]:
        """Return all figures as JSON. Infinite values become None."""
        period_s = self.prediction.period_s
        told = asdict(self.prediction)
        return {
            "target": self.target,
            "workload": asdict(self.fleet.workload),
            "scoring": self.fleet.scoring or None,
            "verifying": self.fleet.verifying or None,
            "evaluating": self.fleet.evaluating or None,
            "spent": asdict(self.fleet.spent) if self.fleet.spent else None,
            "nodes": [asdict(kind) for kind in self.fleet.kinds],
            "prediction": told
            | {
                "period_s": period_s if period_s != float("inf") else None,
                "idle": self.prediction.idle,
                "missing_per_s": self.prediction.missing_per_s,
            },
            "advice": asdict(self.advice) | {"added": dict(self.advice.added)},
            "cheapest": asdict(self.cheapest) if self.cheapest else None,
            "times_as_many": self.times_as_many,
            "placement": asdict(self.placement) if self.placement else None,
            "verdict": self.verdict,
        }


def fleet_of_run(store: Store, config: HubConfig) -> PlannedFleet:
    """Return the fleet of a run, measured over the newest steps and recently active nodes. Raises ConfigError for
    a run without a task, and before the first step.
    """
    config.check_trains()
    steps = newest_steps(store)
    pace = read_pace(store, config, steps, None)
    if pace is None:
        raise ConfigError(
            "This run has not trained a step yet, so there are no measurements.",
            do="Wait for its first steps, or describe a fleet: echo-hub plan --example > fleet.toml",
        )
    # Node names come from strangers and are printed to a terminal.
    nodes = tuple(replace(node, name=display_name(node.name)) for node in pace.nodes)
    started_at = float(store.read(read_meta).get("started_at", steps[0].planned_at))
    spent = learner_time(steps, started_at=started_at)
    return PlannedFleet(
        workload=pace.workload,
        nodes=nodes,
        kinds=kinds_of(nodes),
        scoring=where(config),
        verifying=_verifying(config),
        evaluating=_evaluating(config),
        spent=spent,
    )


def _verifying(config: HubConfig) -> str:
    if config.run.mode == "colocated":
        return "nowhere: the hub samples for itself"
    return {
        "process": "a separate process of the hub",
        "ray": _actor(config, "verifier"),
        "nodes": "proven nodes",
        "off": "nowhere: trust.verifier is off",
    }[config.trust.verifier]


def _evaluating(config: HubConfig) -> str:
    return {"hub": "the learner, between two steps", "ray": _actor(config, "evaluator"), "nodes": "the nodes"}[
        config.evaluation.by
    ]


def _actor(config: HubConfig, kind: WorkerKind) -> str:
    return f"a Ray actor at {config.ray.address}, {config.ray.set_aside(kind)}"


def fleet_of_file(path: Path) -> PlannedFleet:
    """Read the fleet from a file. Raises ConfigError if it is unreadable or invalid."""
    try:
        said = FleetFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8-sig")))
    except ValidationError as error:
        wrong = error.errors()[0]
        place_of = ".".join(str(part) for part in wrong["loc"])
        raise ConfigError(
            "The fleet file is invalid.", got=f"{place_of or path.name}: {wrong['msg']}", do=_SEE_EXAMPLE
        ) from error
    except (OSError, ValueError, RecursionError) as error:  # Too deeply nested lists raise RecursionError.
        raise ConfigError("The fleet file cannot be read.", got=f"{path}: {error}", do=_SEE_EXAMPLE) from error
    kinds = tuple(NodeClass(**entry.model_dump() | {"name": display_name(entry.name)}) for entry in said.nodes)
    is_async = said.mode == "async"
    return PlannedFleet(
        workload=Workload(
            **said.model_dump(exclude={"nodes", "max_staleness", "publish_every"}),
            max_staleness=said.max_staleness if is_async else 0,
            publish_every=said.publish_every if is_async else 1,
        ),
        nodes=kinds,
        kinds=kinds,
    )


_SEE_EXAMPLE: Final = "Compare it with the output of: echo-hub plan --example"


def changed(
    fleet: PlannedFleet, *, staleness: int | None = None, publish_every: int | None = None, add: Sequence[str] = ()
) -> PlannedFleet:
    """Return the fleet with other settings and with more nodes.

    Each entry of `add` is CLASS=N. CLASS is the name of a class, or a part of the name that no other class's name
    contains.
    """
    workload, nodes = fleet.workload, list(fleet.nodes)
    if workload.mode != "async" and (staleness is not None or publish_every is not None):
        raise ConfigError("Staleness and publication interval are settings of async mode.", got=f"{workload.mode} mode")
    workload = replace(
        workload,
        max_staleness=workload.max_staleness if staleness is None else staleness,
        publish_every=workload.publish_every if publish_every is None else publish_every,
    )
    for wish in add:
        name, _, number = wish.rpartition("=")
        if not name or not (number.isascii() and number.isdigit() and len(number) <= 7):
            raise ConfigError("--add needs a class of nodes and a number.", got=wish, do="Example: --add 'laptop=3'")
        nodes.append(replace(_kind(fleet.kinds, name), count=int(number)))
    if workload.publish_every > workload.staleness_bound + 1:
        raise ConfigError(
            "Versions must be published at least every staleness bound + 1 steps, or nothing is fresh enough.",
            got=f"a version every {workload.publish_every} steps and a bound of {workload.staleness_bound}",
        )
    return replace(fleet, workload=workload, nodes=tuple(nodes), kinds=kinds_of(nodes))


def _kind(kinds: Sequence[NodeClass], name: str) -> NodeClass:
    found = [kind for kind in kinds if kind.name == name] or [
        kind for kind in kinds if name.casefold() in kind.name.casefold()
    ]
    if len(found) != 1:
        raise ConfigError(
            f"{'No class of nodes has' if not found else 'Several classes of nodes have'} that name.",
            got=name,
            do="Use one of these: " + ", ".join(kind.name for kind in kinds),
        )
    return found[0]


def make_plan(fleet: PlannedFleet, *, target: float) -> Plan:
    prediction = predict(fleet.workload, Pool.of(fleet.nodes))
    advice = advise(fleet.workload, fleet.nodes, fleet.kinds, target=target)
    return Plan(
        fleet=fleet,
        target=target,
        prediction=prediction,
        advice=advice,
        cheapest=cheapest_to_add(fleet.workload, Pool.of(fleet.nodes), fleet.kinds, target),
        times_as_many=times_as_many(fleet.workload, fleet.nodes, target),
        placement=place(fleet.workload, fleet.kinds, target=target),
        verdict=verdict(fleet.workload, fleet.nodes, prediction, advice, target),
    )


def write_json(plan: Plan, path: Path) -> None:
    path.write_text(json.dumps(plan.as_json(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
