"""Cases of one fleet. All sides (the compared ways to send) send equal bytes to the same nodes over the same links, in
turn.

The measured time begins when the hub announces a prepared payload, and ends when the last node has verified it.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import socket
import statistics
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from benchmarks.dissemination.fleet import Fleet, Host, open_fleet
from benchmarks.dissemination.links import LinkSet
from benchmarks.dissemination.wan.homes import Wan, WanSet
from benchmarks.dissemination.wan.routers import Router
from benchmarks.harness.progress import Planned, Progress

Side = Literal["http", "libtorrent", "echo", "echo swarm"]
"""The compared ways to send. `echo`: the hub chooses how its pieces travel. `echo swarm`: only by BitTorrent."""

LINK_SETS: Final = tuple(
    LinkSet(hub_up=hub_up, node_down=100, node_up=node_up) for hub_up in (20, 100) for node_up in (20, 40)
)
SMALL, MIDDLE, LARGE = 500_000, 8_000_000, 64_000_000
REPEATS_S: Final = 180.0
"""Seconds of measurement after which a case gets no further repetition."""
START_S: Final = 4.0
"""Expected seconds until a fleet of eight nodes has started."""
NUM_NODES: Final = (4, 8, 16)
USUAL_LOSS: Final = 0.002
"""Largest share of lost packets that counts as usual for a home link."""
LOSSES: Final = (0.0, USUAL_LOSS, 0.01)
BEHIND: Final[tuple[tuple[Router, ...], ...]] = (
    ("cone",),
    ("symmetric",),
    ("mapping",),
    ("ipv6", "dual"),
)
"""Routers in front of the homes, one tuple for each case. None of them accepts unsolicited connections."""
LINKING_S: Final = 10.0
"""Seconds that nodes behind routers get to link with each other before the first version."""
HEADLINE_NODES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One payload for one fleet. Every side (way to send) sends it `repeats` times, in turn."""

    size_bytes: int
    sides: tuple[Side, ...]
    repeats: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetCases:
    links: LinkSet | WanSet
    num_nodes: int
    cases: tuple[Case, ...]

    def name(self, case: Case) -> str:
        behind = f"{self.behind}: " if self.behind else ""
        return f"{behind}{case.size_bytes / 1e6:g} MB to {self.num_nodes} nodes, {self.links.name}"

    @property
    def behind(self) -> str:
        """The obstacle to connections from other homes to the nodes, in words; empty if there is none."""
        return self.links.behind if isinstance(self.links, WanSet) else ""

    def wanted(self, progress: Progress) -> tuple[Case, ...]:
        return tuple(case for case in self.cases if progress.wants(self.name(case)))


def plan(fleets: Sequence[FleetCases], lacks: str = "") -> list[Planned]:
    return [
        Planned(name=fleet.name(case), seconds=_seconds(fleet, case), lacks=lacks)
        for fleet in fleets
        for case in fleet.cases
    ]


def _seconds(fleet: FleetCases, case: Case) -> float:
    """Return the expected seconds of the case: for HTTP, the time in which the hub's uplink sends one copy to each
    node; for each other side (way to send), a little more than the lower bound.
    """
    bound_s = fleet.links.bound_s(case.size_bytes, fleet.num_nodes)
    unicast_s = fleet.num_nodes * case.size_bytes * 8e-6 / fleet.links.hub_up
    sides_s = sum(unicast_s if side == "http" else 1.3 * bound_s + 0.5 for side in case.sides)
    return case.repeats * sides_s + START_S * fleet.num_nodes / HEADLINE_NODES


def over_links() -> list[FleetCases]:
    return [
        FleetCases(links=links, num_nodes=num_nodes, cases=tuple(_cases(links, num_nodes)))
        for num_nodes in NUM_NODES
        for links in LINK_SETS
    ]


def over_wan() -> list[FleetCases]:
    sides: tuple[Side, ...] = ("http", "libtorrent", "echo")
    cases = tuple(Case(size_bytes=size, sides=sides, repeats=3) for size in (MIDDLE, SMALL))
    open_homes = [FleetCases(links=WanSet(loss=loss), num_nodes=HEADLINE_NODES, cases=cases) for loss in LOSSES]
    behind = [
        FleetCases(links=WanSet(loss=USUAL_LOSS, routers=kinds), num_nodes=HEADLINE_NODES, cases=cases[:1])
        for kinds in BEHIND
    ]
    return [*open_homes, *behind]


def _cases(links: LinkSet, num_nodes: int) -> Iterator[Case]:
    """Yield a fleet's cases. HTTP is measured with 8 nodes only. It takes minutes with larger payloads, and does not
    depend on the nodes' uplinks, so it sends these on one link set per hub uplink. Libtorrent sends the largest payload
    on two link sets only.
    """
    if num_nodes != HEADLINE_NODES:
        yield Case(size_bytes=SMALL, sides=("libtorrent", "echo"), repeats=3)
        yield Case(size_bytes=MIDDLE, sides=("libtorrent", "echo"))
        return
    unicast: tuple[Side, ...] = ("http",) if links.node_up == LINK_SETS[0].node_up else ()
    others: tuple[Side, ...] = ("libtorrent", "echo swarm") if links in (LINK_SETS[0], LINK_SETS[-1]) else ()
    yield Case(size_bytes=SMALL, sides=("http", "libtorrent", "echo", "echo swarm"), repeats=3)
    yield Case(size_bytes=MIDDLE, sides=(*unicast, "libtorrent", "echo", "echo swarm"), repeats=2)
    yield Case(size_bytes=LARGE, sides=(*unicast, *others, "echo"))


CONFIG_FILE: Final = "adapter_config.json"
WEIGHTS_FILE: Final = "adapter_model.safetensors"
TENSORS: Final = 8
_EXPONENTS: Final = 0x7F80
"""Smallest bit pattern of bfloat16, without the sign, that is not a finite number. Random weights use only smaller
ones.
"""


def write_adapter(directory: Path, size_bytes: int, seed: int) -> None:
    import torch  # Imported here because nodes use only `digest_of`, without torch.
    from safetensors.torch import save_file

    rng = np.random.default_rng(seed)
    weights = {}
    for number in range(TENSORS):
        rank = 16
        bits = rng.integers(0, _EXPONENTS, (rank, size_bytes // (2 * rank * TENSORS)), np.int16)
        signs = rng.integers(0, 2, bits.shape, np.int16) << 15
        name = f"base_model.model.model.layers.{number}.self_attn.q_proj.lora_A.weight"
        weights[name] = torch.from_numpy(bits | signs).view(torch.bfloat16)
    directory.mkdir(parents=True)
    save_file(weights, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    (directory / CONFIG_FILE).write_text(json.dumps({"peft_type": "LORA", "r": 16, "lora_alpha": 32}))


def digest_of(adapter: Path) -> str:
    """Hash the names and contents of all files. Blocks the calling thread."""
    found = hashlib.sha256()
    for path in sorted(adapter.iterdir()):
        found.update(path.name.encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


Row = dict[str, Any]
WAYS: Final[dict[Side, str]] = {"echo": "auto", "echo swarm": "swarm"}
"""Value of the hub's setting `dissemination.way` for each side (way to send)."""
PATIENCE_S: Final = 30.0
PATIENCE_BOUNDS: Final = 4
"""A transfer with libtorrent is given up after `PATIENCE_S` seconds plus this multiple of the lower bound."""
SHARES: Final = {"pushed": "pushed_bytes", "mesh": "mesh_bytes", "swarm": "swarm_bytes", "web_seed": "web_seed_bytes"}
LINKING: Final = ("hub_payloads", "linked_share", "link_s")
"""Figures of a row: bytes that the hub sent, as a multiple of the payload; the share of pairs of nodes behind routers
that linked; and the seconds until the last of these pairs linked.
"""


async def measure_fleet(cases: FleetCases, seed: int, progress: Progress) -> list[Row]:
    """Measure the wanted cases of a fleet; return a row for each case and side."""
    wanted = cases.wanted(progress)
    if not wanted:
        return []
    with tempfile.TemporaryDirectory(prefix="echo-dissemination-") as directory:
        async with open_fleet(cases.links, cases.num_nodes, Path(directory)) as fleet:
            rounds = _Rounds(fleet, cases, seed, progress)
            await rounds.open()
            return [row for case in wanted for row in await rounds.measure(case)]


class _Rounds:
    def __init__(self, fleet: Fleet, cases: FleetCases, seed: int, progress: Progress) -> None:
        self._fleet = fleet
        self._cases = cases
        self._seed = seed
        self._progress = progress
        self._version = 0

    async def open(self) -> None:
        """Open all sides (the compared ways to send), and wait until the nodes are linked."""
        sides = {side for case in self._cases.cases for side in case.sides}
        for side, way in WAYS.items():
            if side in sides or side == "echo":
                url = await self._fleet.hub.ask("open_echo", side=side, way=way)
                await self._fleet.of_nodes("join", side=side, url=url)
                within_s = LINKING_S if self._cases.behind else None
                self._linked = await self._fleet.hub.ask(
                    "linked", side=side, num_nodes=self._cases.num_nodes, within_s=within_s
                )
        self._baselines = await self._fleet.hub.ask("open_baselines", side="echo")
        opened = await self._fleet.of_nodes("open_baselines")
        places = [self._place(number, peer) for number, peer in zip(self._fleet.nodes, opened, strict=True)]
        self._peers = [self._baselines["peer"], *places]

    def _place(self, number: int, peer: list[Any]) -> list[Any]:
        """Return the address at which other hosts reach the libtorrent peer of node `number`. It listens at `peer`."""
        net = self._fleet.net
        family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
        return [net.outside(number, family), peer[1]] if isinstance(net, Wan) else peer

    async def measure(self, case: Case) -> list[Row]:
        found: dict[Side, list[Row]] = {side: [] for side in case.sides}
        for repeat in self._progress.repetitions(case.repeats, within_s=REPEATS_S):
            self._version += 1
            adapter = self._fleet.directory / f"adapter{self._version}"
            write_adapter(adapter, case.size_bytes, self._seed + self._version)
            payload = await self._prepare("echo", adapter)
            own: dict[Side, Row] = {
                side: await self._prepare(side, adapter) for side in case.sides if side in WAYS and side != "echo"
            }
            # Each repetition begins with another side.
            first = repeat % len(case.sides)
            for side in case.sides[first:] + case.sides[:first]:
                self._emulator_cores()
                sent = await self._send(side, own.get(side, payload))
                found[side].append({**sent, **self._emulator_cores()})
                if side in WAYS and await digests(self._fleet.nodes.values(), side, self._version) != {sent["digest"]}:
                    raise RuntimeError(f"nodes have other files of version {self._version} than the hub published")
            shutil.rmtree(adapter)
        rows = [self._row(side, runs) for side, runs in found.items()]
        figures = {row["side"]: f"{row['seconds']:.2f} s = {row['ratio_to_bound']:.2f} x bound" for row in rows}
        self._progress.done(self._cases.name(case), figures)
        return rows

    def _emulator_cores(self) -> Row:
        """Return the emulator's processor time since the last call, as a share of a core; empty without an emulator."""
        net = self._fleet.net
        return {"emulator_cores": net.carried()["cores"]} if isinstance(net, Wan) else {}

    async def _send(self, side: Side, payload: Row) -> Row:
        if side == "http":
            return {**payload, "took_s": await self._over_http(payload)}
        if side == "libtorrent":
            return {**payload, **await self._over_libtorrent(payload)}
        return await self._over_echo(side, payload)

    async def _prepare(self, side: Side, adapter: Path) -> Row:
        ready: Row = await self._fleet.hub.ask("prepare", side=side, version=self._version, adapter=str(adapter))
        return {**ready, "digest": await asyncio.to_thread(digest_of, adapter)}

    async def _over_http(self, payload: Row) -> float:
        began_at = time.time()
        url = f"{self._baselines['url']}/{payload['file']}"
        return float(max(await self._fleet.of_nodes("http", url=url, sha256=payload["sha256"])) - began_at)

    async def _over_libtorrent(self, payload: Row) -> Row:
        """Send with libtorrent. A transfer that never ends counts with the full patience."""
        bound_s = self._cases.links.bound_s(payload["bytes"], self._cases.num_nodes)
        patience_s = PATIENCE_S + PATIENCE_BOUNDS * bound_s
        about = {"torrent": payload["torrent"], "patience_s": patience_s}
        await self._fleet.hub.ask("seed", torrent=payload["torrent"])
        began_at = time.time()
        fetches = [
            node.ask("libtorrent", peers=[peer for peer in self._peers if peer != own], **about)
            for node, own in zip(self._fleet.nodes.values(), self._peers[1:], strict=True)
        ]
        ends = await asyncio.gather(*fetches)
        await self._fleet.of_nodes("libtorrent_forget")
        await self._fleet.hub.ask("unseed")
        stuck = ends.count(None)
        return {"took_s": patience_s if stuck else max(ends) - began_at, "stuck_nodes": stuck}

    async def _over_echo(self, side: Side, payload: Row) -> Row:
        sent_before = await self._fleet.hub.ask("sent_bytes")
        waiting = asyncio.create_task(received(self._fleet.nodes.values(), side, self._version))
        began_at: float = await self._fleet.hub.ask("announce", side=side, version=self._version)
        got = await waiting
        sent_bytes = await self._fleet.hub.ask("sent_bytes") - sent_before
        return {
            **payload,
            "took_s": max(node["at"] for node in got) - began_at,
            **shares(got, payload["bytes"]),
            "hub_payloads": sent_bytes / payload["bytes"],
            **(self._linked if self._cases.behind else {}),
        }

    def _row(self, side: Side, runs: list[Row]) -> Row:
        links, num_nodes = self._cases.links, self._cases.num_nodes
        seconds = [run["took_s"] for run in runs]
        bound_s = links.bound_s(runs[0]["bytes"], num_nodes)
        median_s = statistics.median(seconds)
        return {
            "side": side,
            **links.columns,
            "nodes": num_nodes,
            "payload_bytes": runs[0]["bytes"],
            "bound_s": bound_s,
            "seconds": median_s,
            "worst_s": max(seconds),
            "ratio_to_bound": median_s / bound_s,
            "over_bound_s": median_s - bound_s,
            "runs": len(runs),
            **{name: statistics.median(run[name] for run in runs) for name in (*SHARES, *LINKING) if name in runs[0]},
            **({"emulator_cores": max(run["emulator_cores"] for run in runs)} if "emulator_cores" in runs[0] else {}),
            **({"stuck_nodes": sum(run["stuck_nodes"] for run in runs)} if side == "libtorrent" else {}),
        }


async def received(nodes: Iterable[Host], side: Side, version: int) -> list[Row]:
    got: list[Row] = await asyncio.gather(*(node.ask("received", side=side, version=version) for node in nodes))
    return got


async def digests(nodes: Iterable[Host], side: Side, version: int) -> set[str]:
    """Return the hashes of the version's files on these nodes. Call this after all nodes have the version, because
    hashing would slow their fetches down.
    """
    return set(await asyncio.gather(*(node.ask("digest", side=side, version=version) for node in nodes)))


def shares(got: list[Row], payload_bytes: int) -> Row:
    """Return, for each kind of source (`SHARES`), the bytes that all nodes together received from it, as a share of the
    bytes that they need.
    """
    return {name: sum(node[source] for node in got) / payload_bytes / len(got) for name, source in SHARES.items()}
