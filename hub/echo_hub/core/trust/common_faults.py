"""Faults that are not a node's: never condemn what all nodes show.

A version, a problem, or the verifier itself can be at fault. So the nodes of each class of numerics are counted that
were checked on a version, and on a group, and those of them that failed. Once `LEAST_FAILED` have failed and these are
`SHARE` of those checked, verdicts of that class on it are *suspended*: nobody is condemned for it any more, who already
was is let go, and the operator is told. What fails is not trained on all the same.

Where established nodes were checked they alone are counted: keys that cost nothing have no vote. Among strangers all
are, so that the first nodes of a class that the verifier cannot judge are not lost; what a swarm of hostile ones gains
is that they are asked on, and all that they send is checked before anybody trains on it.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from echo_hub.core.trust.numerics import NumericsClass

LEAST_FAILED: Final = 3
SHARE: Final = 0.5
KEPT: Final = 512
"""Versions and groups that are remembered, class by class; which were checked on longest ago are forgotten first."""
MOST_NODES: Final = 1_024
"""Nodes that are counted of each."""

Cause = tuple[NumericsClass, str, int]
"""A class, and `version` or `group` with its number."""


@dataclass(slots=True, eq=False)
class _Count:
    checked: dict[str, bool] = field(default_factory=dict)
    """Nodes, and whether they were established."""
    failed: set[str] = field(default_factory=set)

    @property
    def is_common(self) -> bool:
        voters = {node_id for node_id, is_established in self.checked.items() if is_established} or self.checked.keys()
        failed = len(self.failed & voters)
        return failed >= LEAST_FAILED and failed >= SHARE * len(voters)


class CommonFaults:
    """Told of every verdict."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Cause, _Count] = OrderedDict()

    def note(self, cause: Cause, node_id: str, *, is_established: bool, failed: bool) -> None:
        """A node of the class was checked on this version or group. `is_established`: it was proven until then."""
        count = self._counts.pop(cause, None) or _Count()
        self._counts[cause] = count
        if len(self._counts) > KEPT:
            self._counts.popitem(last=False)
        if node_id in count.checked or len(count.checked) < MOST_NODES:
            count.checked[node_id] = is_established or count.checked.get(node_id, False)
            if failed:
                count.failed.add(node_id)

    def suspended(self, causes: tuple[Cause, ...]) -> Cause | None:
        """Of these, one for which nobody may be condemned."""
        return next((cause for cause in causes if (c := self._counts.get(cause)) is not None and c.is_common), None)

    def failed(self, cause: Cause) -> tuple[str, ...]:
        """Who failed on it, in order."""
        return tuple(sorted(self._counts[cause].failed))

    @property
    def all_suspended(self) -> tuple[Cause, ...]:
        """All that nobody may be condemned for, the latest last."""
        return tuple(cause for cause, count in self._counts.items() if count.is_common)
