"""A recorded fleet of unequal machines: the seconds that each took for a token, rollout after rollout.

`python -m benchmarks.learning.recording FILE` carries out a short run of a hub and the nodes of `FLEET`, which are
processes with different engines, precisions and priorities. The output file lists every node's seconds per token,
rollout by rollout in order of arrival: `sampling_s` over the tokens, from the run's database. arrivals.json was
recorded so on two cores that other programs used too."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.processes import RunFailed, hub_process, node_process, wait_for_steps
from echo_hub.config.file import load_config
from echo_hub.run.directory import RunDirectory
from echo_hub.run.making import make_run
from echo_hub.simulator.population import Traits
from echo_hub.store.browsing import LOOKED_AT, NEWEST, find_rollouts, read_tokens
from echo_hub.store.changing import key_of
from echo_hub.store.store import Store
from echo_shared.rollout_books import RolloutFilter

RECORDED: Final = Path(__file__).with_name("arrivals.json")
RECORDS_WITHIN_S: Final = 300.0
UPLINK_BYTES_S: Final = 2.5e6
"""Uplink of each node, 20 Mbit/s; links are not recorded."""
DOWNLINK_BYTES_S: Final = 12.5e6
LEAST_ROLLOUTS: Final = 16
"""Least rollouts of every node."""
MOST_ROLLOUTS: Final = 256
"""Rollouts of each node that are kept, the first ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Options and priority of one node."""

    backend: str
    precision: str
    width: int
    nice: int
    """Niceness of the process, which leaves it a share of a busy processor."""

    @property
    def options(self) -> list[str]:
        """Options of `echo-node join`."""
        return ["--backend", self.backend, "--precision", self.precision, "--width", str(self.width)]


FLEET: Final = (
    Machine(backend="llama_cpp", precision="f32", width=16, nice=0),
    Machine(backend="torch", precision="f32", width=16, nice=3),
    Machine(backend="llama_cpp", precision="q8_0", width=8, nice=5),
    Machine(backend="torch", precision="bf16", width=8, nice=8),
    Machine(backend="llama_cpp", precision="q8_0", width=4, nice=10),
    Machine(backend="llama_cpp", precision="q4_k_m", width=4, nice=13),
)

SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "server": {"port": 0},
    "training": {"steps": 60, "groups_per_step": 32, "max_staleness": 4},
    "trust": {"verifier": "off"},
    "evaluation": {"problems": 16},
    "learner": {"threads": 1},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedNode:
    """A node of the recorded fleet."""

    backend: str
    precision: str
    width: int
    paces: tuple[float, ...]
    """Seconds a token of each rollout, in the order of arrival."""

    @property
    def traits(self) -> Traits:
        """Make the simulator's node with this pace."""
        return Traits(
            width=self.width,
            capacity=2 * self.width,
            s_per_token=sum(self.paces) / len(self.paces),
            paces=self.paces,
            prefill_s=0.0,  # The paces include the prompts.
            fetch_s=0.0,
            phase=0.0,
            price_per_hour=0.0,
            uplink_bytes_s=UPLINK_BYTES_S,
            downlink_bytes_s=DOWNLINK_BYTES_S,
        )


def load(file: Path = RECORDED) -> tuple[RecordedNode, ...]:
    """Read the nodes of a recording."""
    return tuple(RecordedNode(**{**node, "paces": tuple(node["paces"])}) for node in json.loads(file.read_text()))


def of_books(store: Store, fleet: Mapping[str, Machine]) -> list[RecordedNode]:
    """Read the paces of these nodes from a run's database. Raises RunFailed if a node has returned too few rollouts."""
    arrivals: dict[str, list[tuple[float, float]]] = {name: [] for name in fleet}
    before: tuple[int, int] | None = NEWEST
    while before is not None:
        found = store.read(find_rollouts, RolloutFilter(), before, limit=LOOKED_AT)
        came = {key_of(one.rollout_id): one for one in found.rollouts if one.received_at is not None}
        for key, tokens in store.read(read_tokens, came).items():
            one = came[key]
            if one.node_name in arrivals and not tokens.spans and tokens.sampling_s > 0:
                pace = round(tokens.sampling_s / len(tokens.completion_ids), 6)
                arrivals[one.node_name].append((one.received_at or 0.0, pace))
        before = found.before
    few = {name: len(came) for name, came in arrivals.items() if len(came) < LEAST_ROLLOUTS}
    if few:
        raise RunFailed(f"too few rollouts to know a machine by: {few}; {LEAST_ROLLOUTS} are needed of each")
    return [
        RecordedNode(
            backend=one.backend,
            precision=one.precision,
            width=one.width,
            paces=tuple(pace for _, pace in sorted(arrivals[name])[:MOST_ROLLOUTS]),
        )
        for name, one in fleet.items()
    ]


def record(
    directory: Path, settings: Mapping[str, Mapping[str, Any]], fleet: Mapping[str, Machine]
) -> list[RecordedNode]:
    """Carry out the run with these nodes, as processes, below `directory`. Raises RunFailed."""
    run = RunDirectory(directory / "run")
    config = load_config(None, settings)
    make_run(run, config)
    with ExitStack() as processes:
        hub, url = processes.enter_context(hub_process(run.root, directory / "hub.log"))
        nodes = [
            processes.enter_context(
                node_process(url, directory / name, machine.options, within=["nice", "-n", str(machine.nice)])
            )
            for name, machine in fleet.items()
        ]
        wait_for_steps(run, config.training.steps, processes=[hub, *nodes], within_s=RECORDS_WITHIN_S)
    store = Store.open(run.database_url)
    try:
        return of_books(store, fleet)
    finally:
        store.close()


def main(out: Path) -> None:
    fleet = {f"node-{number}": machine for number, machine in enumerate(FLEET)}
    with tempfile.TemporaryDirectory(prefix="echo-recording-") as directory:
        recorded = record(Path(directory), SETTINGS, fleet)
    out.write_text(json.dumps([asdict(node) for node in recorded], indent=1) + "\n")
    for name, node in zip(fleet, recorded, strict=True):
        pace = 1000 * node.traits.s_per_token
        about = f"{node.backend} {node.precision}, width {node.width}"
        print(f"{name}: {about}: {len(node.paces)} rollouts, {pace:.1f} ms a token")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
