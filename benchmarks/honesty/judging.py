"""The hub's own verdict about a node from the evidence of its rollouts, without a running hub."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from echo_hub.core.trust.evidence import NO_EVIDENCE, Evidence
from echo_hub.core.trust.judging import NOTHING, added, alarm, judged, weigh
from echo_hub.core.trust.numerics import Honest, Numerics, NumericsClass
from echo_hub.core.trust.settings import TrustSettings

FALSE_ALARM: Final = TrustSettings().false_alarm
Known = Callable[[Evidence], Honest]
"""Function that gets a node's newest evidence and returns the rounding errors that the hub expects of honest nodes of
its class (backend and precision).
"""


def known_by(numerics: NumericsClass, measured: Evidence, *, temperature: float) -> Known:
    """Return the rounding errors that a hub expects of honest nodes of this class, when it has measured the class
    itself (`measured`) but has no evidence from nodes of the class yet.
    """
    classes = Numerics(temperature)
    classes.measured(numerics.rounding, measured)
    of_class = classes.known(numerics)
    return lambda recent: classes.honest(of_class, shown=recent)


def judged_in_order(order: Iterable[Evidence], known: Known) -> Iterator[tuple[float, bool]]:
    """For each rollout of a node, yield the total evidence against the node so far (in nats), and True if it convicts
    the node. A hub forgets old evidence; here nothing is forgotten, because the node returns too few tokens.
    """
    sums, recent, enough = NOTHING, NO_EVIDENCE, alarm(FALSE_ALARM)
    for evidence in order:
        honest = known(recent)
        nats = max(added(sums, weigh(evidence, honest)))
        sums, recent = judged(sums, evidence, recent, honest, enough), recent + evidence
        yield nats, max(sums) >= enough


def orders(shown: Sequence[tuple[int, Evidence]], count: int, seed: int) -> Iterator[list[Evidence]]:
    """Yield `count` random orders of the evidence in `shown`. Each pair in `shown` has a group's number and a rollout's
    evidence. The rollouts of a group stay together.
    """
    groups: dict[int, list[Evidence]] = {}
    for group_id, evidence in shown:
        groups.setdefault(group_id, []).append(evidence)
    for number in range(count):
        ids = list(groups)
        random.Random(f"{seed} {number}").shuffle(ids)
        yield [evidence for group_id in ids for evidence in groups[group_id]]


def honest_nodes(shown: Sequence[tuple[int, Evidence]], known: Known, *, count: int, seed: int) -> dict[str, Any]:
    """Judge `count` honest nodes, each of which returns the same rollouts with the groups in another random order."""
    nodes = [list(judged_in_order(order, known)) for order in orders(shown, count, seed)]
    return {
        "false_quarantines": sum(any(failed for _, failed in node) for node in nodes),
        "highest_nats": max(nats for node in nodes for nats, _ in node),
    }
