"""The operator's fleet list: filtering, sorting and counting nodes.

The functions work on the nodes of a snapshot: at most ten thousand, plus the connected ones. Engines, devices,
precisions and names are untrusted texts from the nodes, possibly a different text from every node.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Final
from urllib.parse import urlencode

from echo_hub.dashboard import tables
from echo_hub.dashboard.model import FleetView, NodesAway, NodeView, RunState, RunView
from echo_hub.dashboard.responses import whole_number
from echo_hub.dashboard.tables import Column, known_sort, sort_rows
from echo_shared.wire.messages.engines import precision_in_words

_ID: Final = attrgetter("totals.node_id")
NODES_SHOWN: Final = 100
FOREMOST_SHOWN: Final = 10
KINDS_SHOWN: Final = 8
"""Largest number of pairs (engine, precision) that the summary shows. It shows the most frequent pairs."""
CHOICES_SHOWN: Final = 40
"""Number of engines, and of precisions, that the filter's lists offer: the most frequent ones."""
MOST_ASKED: Final = 128
"""Longest text in a filter's query, in characters."""

STATES: Final = (
    *("sampling", "fetching", "preparing", "waiting", "standing_by", "paused", "draining", "away", "banned"),
)
UNCHECKED: Final = "unchecked"
STANDINGS: Final = ("quarantined", "suspect", "new", "proven", UNCHECKED)
"""Trust standings, in the order in which an operator wants to see them."""
FASTEST: Final = "speed"
"""Key of the default sort column."""
NOT_SAID: Final = "-"
"""Value of a filter in the page address that selects nodes without the property, for example with an unknown
precision."""

_PLACE: Final = {state: place for place, state in enumerate(STATES)}
_RANK: Final = {standing: rank for rank, standing in enumerate(STANDINGS)}
_WHILE: Final = {
    "preparing": "its engine is starting",
    "fetching": "the newest version",
    "paused": "by its owner's settings",
    "draining": "leaves after its current work",
}


class WrongFleetQueryError(ValueError):
    """An invalid filter value, described for the page."""


def state_of(node: NodeView) -> str:
    """Return one of `STATES`: the node's activity, or a state that is more important (banned, away, standing_by)."""
    if node.banned:
        return "banned"
    if not node.connected:
        return "away"
    return "standing_by" if node.standby else node.activity


def standing_of(node: NodeView) -> str:
    return node.totals.standing or UNCHECKED


def why_idle(node: NodeView, run: RunView) -> str:
    """Return a few words that tell why a connected node does not sample; "" if it samples."""
    if node.standby:
        return node.standby
    if node.activity != "waiting":
        return _WHILE.get(node.activity, "")
    if run.state is RunState.FINISHED:
        return "the run is finished"
    if run.leasing != "open":
        return f"leasing is {run.leasing}"
    return "it has no lease now" if node.capacity else "it accepts no work now"


COLUMNS: Final[tuple[Column[NodeView], ...]] = (
    Column(key="name", title="Node", order=lambda node: (node.totals.name.casefold(), node.totals.node_id)),
    Column(key="state", title="Doing", order=lambda node: (_PLACE.get(state_of(node), len(_PLACE)), node.standby)),
    Column(key="engine", title="Engine", order=lambda node: (node.totals.backend, node.totals.device), css="wide"),
    Column(key="precision", title="Precision", order=lambda node: node.precision, css="wide"),
    Column(
        key="version",
        title="Version",
        order=lambda node: -1 if node.policy_version is None else node.policy_version,
        descending=True,
        css="number wide",
    ),
    Column(
        key=FASTEST,
        title="Tokens/s",
        order=lambda node: (node.connected, node.tokens_per_s, node.totals.last_seen),
        descending=True,
        css="number",
    ),
    Column(key="held", title="Holds", order=lambda node: node.in_flight, descending=True, css="number wide"),
    Column(
        key="received", title="Received", order=lambda node: node.totals.received, descending=True, css="number roomy"
    ),
    Column(key="trained", title="Trained", order=lambda node: node.trained, descending=True, css="number"),
    Column(key="dropped", title="Dropped", order=lambda node: node.totals.dropped, descending=True, css="number roomy"),
    Column(
        key="standing",
        title="Standing",
        order=lambda node: (_RANK.get(standing_of(node), len(_RANK)), -node.totals.failed_checks, -node.totals.checks),
        css="wide",
    ),
    Column(
        key="cost",
        title="Cost",
        order=lambda node: (node.totals.cost, node.totals.cost_per_hour),
        descending=True,
        css="number wide",
    ),
    Column(
        key="seen", title="Last seen", order=lambda node: node.totals.last_seen, descending=True, css="number roomy"
    ),
)


def columns(*, has_costs: bool) -> tuple[Column[NodeView], ...]:
    """Return the table's columns; the cost column only if any node has costs."""
    return tuple(column for column in COLUMNS if has_costs or column.key != "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetQuery:
    """A filter for nodes. A node matches if it meets every condition; every node meets an empty condition ("")."""

    sort: str = ""
    """A column's key, with "-" in front for the reverse order; "" keeps the given order."""
    search: str = ""
    """Text to find in the name, engine, device or invite name, ignoring case, or at the beginning of the id."""
    state: str = ""
    standing: str = ""
    engine: str = ""
    precision: str = ""
    after: int = 0
    """Number of matching rows to skip before this page."""
    limit: int = NODES_SHOWN

    @property
    def asked(self) -> dict[str, str]:
        """Return the query fields of the page address that shows this filter and order."""
        fields = {"q": self.search, "state": self.state, "standing": self.standing, "engine": self.engine}
        fields |= {"precision": self.precision, "sort": self.sort}
        return {name: value for name, value in fields.items() if value}

    @property
    def is_narrow(self) -> bool:
        """Return True if any condition is set, so that some nodes may not match."""
        return bool(self.asked.keys() - {"sort"})


def fleet_query(query: Mapping[str, str], *, limit: int = NODES_SHOWN) -> FleetQuery:
    """Parse the query of the fleet list's address. Raises WrongFleetQueryError."""
    given = {
        name: " ".join(query.get(name, "").split())[:MOST_ASKED]
        for name in ("q", "state", "standing", "engine", "precision", "after")
    }
    for name, known in (("state", STATES), ("standing", STANDINGS)):
        if given[name] and given[name] not in known:
            raise WrongFleetQueryError(f"{name} must be one of: {', '.join(known)}; not {given[name][:40]!r}")
    after = whole_number(given["after"] or "0")
    if after is None:
        raise WrongFleetQueryError("after must be a number of nodes: 0, 1, 2, ...")
    return FleetQuery(
        sort=known_sort(COLUMNS, query.get("sort", "")),
        search=given["q"],
        state=given["state"],
        standing=given["standing"],
        engine=given["engine"],
        precision=given["precision"],
        after=after,
        limit=limit,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPart:
    """One page of matching nodes, and the number of all matching nodes."""

    nodes: Sequence[NodeView]
    num_found: int


def find_nodes(nodes: Iterable[NodeView], wanted: FleetQuery) -> FleetPart:
    """Return a page of the matching, sorted nodes. Without a sort column, nodes with the most useful work come
    first."""
    found = [node for node in nodes if _fits(node, wanted)] if wanted.is_narrow else list(nodes)
    # Sort first by a unique key, so that ties keep their order between snapshots.
    found.sort(key=_ID if wanted.sort else _work)
    ordered = sort_rows(found, COLUMNS, wanted.sort)
    return FleetPart(nodes=ordered[wanted.after : wanted.after + wanted.limit], num_found=len(ordered))


def _work(node: NodeView) -> tuple[float, str, str]:
    return -node.totals.share, node.totals.name, node.totals.node_id


def _fits(node: NodeView, wanted: FleetQuery) -> bool:
    totals = node.totals
    if wanted.state and state_of(node) != wanted.state:
        return False
    if wanted.standing and standing_of(node) != wanted.standing:
        return False
    if wanted.engine and (totals.backend or NOT_SAID) != wanted.engine:
        return False
    if wanted.precision and (node.precision or NOT_SAID) != wanted.precision:
        return False
    if not wanted.search:
        return True
    # The search text is a single line, so it cannot match across the newlines that join the texts below.
    looked_for = wanted.search.casefold()
    texts = f"{totals.name}\n{totals.device}\n{totals.backend}\n{totals.invite}"
    return looked_for in texts.casefold() or totals.node_id.startswith(looked_for)


def foremost(nodes: FleetView) -> list[NodeView]:
    """Return the few nodes that interest an operator most. Connected nodes come first; among them, distrusted nodes
    come first, then the fastest ones."""
    here = [node for node in nodes.here.values() if node.connected]
    first = heapq.nsmallest(FOREMOST_SHOWN, here, key=_mistrust_and_speed)
    left = [node for node in nodes.here.values() if not node.connected]
    others = [*left, *_foremost_away(nodes.away)] if len(first) < FOREMOST_SHOWN else []
    return first + heapq.nsmallest(FOREMOST_SHOWN - len(first), others, key=_mistrust_and_speed)


@lru_cache(maxsize=1)
def _foremost_away(away: NodesAway) -> list[NodeView]:
    return heapq.nsmallest(FOREMOST_SHOWN, away.by_id.values(), key=_mistrust_and_speed)


def _mistrust_and_speed(node: NodeView) -> tuple[bool, float, float, str]:
    trusted = standing_of(node) not in STANDINGS[:2]
    return trusted, -node.tokens_per_s, -node.totals.last_seen, node.totals.node_id


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetKind:
    """The number of nodes with a common property, and the page address of the list of these nodes."""

    name: str
    number: int
    href: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kinds:
    number: int
    states: tuple[FleetKind, ...]
    """States that at least one node has, in the order of `STATES`."""
    standings: tuple[FleetKind, ...]
    engines: tuple[FleetKind, ...]
    """The most frequent pairs of engine and precision."""
    num_other_engines: int
    """Number of pairs that are not listed."""
    all_engines: tuple[str, ...]
    """The most frequent engines, for the filter's list. An engine is counted over all its precisions together."""
    all_precisions: tuple[str, ...]
    has_costs: bool


@lru_cache(maxsize=1)
def _kinds_away(away: NodesAway) -> Counter[tuple[str, str, str, str, bool]]:
    return Counter(map(_kinds_of, away.by_id.values()))


def kinds(nodes: FleetView) -> Kinds:
    by_state, by_standing = Counter[str](), Counter[str]()
    engines = Counter[tuple[str, str]]()
    has_costs = False
    found = Counter(map(_kinds_of, nodes.here.values())) + _kinds_away(nodes.away)
    for (state, standing, engine, precision, costs), number in found.items():
        by_state[state] += number
        by_standing[standing] += number
        engines[engine, precision] += number
        has_costs = has_costs or costs
    listed = sorted(engines.items(), key=lambda kind: (-kind[1], kind[0]))[:KINDS_SHOWN]
    return Kinds(
        number=len(nodes),
        states=tuple(_kind(state, by_state[state], state=state) for state in STATES if by_state[state]),
        standings=tuple(_kind(one, by_standing[one], standing=one) for one in STANDINGS if by_standing[one]),
        engines=tuple(
            _kind(
                " ".join(filter(None, (engine, precision_in_words(precision)))),
                number,
                engine=engine or NOT_SAID,
                precision=precision or NOT_SAID,
            )
            for (engine, precision), number in listed
        ),
        num_other_engines=len(engines) - len(listed),
        all_engines=_choices((engine, number) for (engine, _), number in engines.items()),
        all_precisions=_choices((precision, number) for (_, precision), number in engines.items()),
        has_costs=has_costs,
    )


def _kinds_of(node: NodeView) -> tuple[str, str, str, str, bool]:
    totals = node.totals
    costs = totals.cost > 0 or totals.cost_per_hour > 0 or node.costs_per_hour > 0
    return state_of(node), standing_of(node), totals.backend, node.precision, costs


def _kind(name: str, number: int, **asked: str) -> FleetKind:
    return FleetKind(name=name, number=number, href=f"/fleet?{urlencode(asked)}")


def _choices(counted: Iterable[tuple[str, int]]) -> tuple[str, ...]:
    totals: Counter[str] = Counter()
    for name, number in counted:
        totals[name or NOT_SAID] += number
    return tuple(sorted(name for name, _ in totals.most_common(CHOICES_SHOWN)))


def page_links(wanted: FleetQuery, part: FleetPart) -> tuple[str, str]:
    return tables.page_links(
        wanted.asked, after=wanted.after, limit=wanted.limit, shown=len(part.nodes), found=part.num_found
    )
