"""Faults that many nodes share: no node is condemned for them.

Possible causes are a version, a problem, and the verifier itself. So for each class of numerics, version and group this
module counts the checked nodes and the failed nodes. Once `LEAST_FAILED` nodes have failed, and they are `SHARE` of the
checked nodes, verdicts of the class on this version or group are *suspended*: no node is condemned for it, condemned
nodes are released, and the operator is told. Failed rollouts are still not trained on.

If established nodes were checked, only they count, because keys cost nothing. If only strangers were checked, all
count, so that the first nodes of a class that the verifier cannot judge are not lost. A swarm of hostile nodes gains
that it still gets work, but all of its rollouts are checked before training.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final

from echo_hub.core.trust.numerics import NumericsClass

LEAST_FAILED: Final = 3
"""Least number of failed nodes that suspends verdicts."""
SHARE: Final = 0.5
"""Least share of failed nodes among the checked ones that suspends verdicts."""
KEPT: Final = 512
"""Number of remembered versions and groups, over all classes. Those whose last check is longest ago go first."""
MOST_NODES: Final = 1_024
"""Most nodes that are counted for each."""

Cause = tuple[NumericsClass, str, int]
"""A class, and `version` or `group` with its number."""


@dataclass(slots=True, eq=False)
class _Count:
    checked: dict[str, bool] = field(default_factory=dict)
    """Checked nodes; True for an established one."""
    failed: set[str] = field(default_factory=set)

    @property
    def is_common(self) -> bool:
        voters = {node_id for node_id, is_established in self.checked.items() if is_established} or self.checked.keys()
        failed = len(self.failed & voters)
        return failed >= LEAST_FAILED and failed >= SHARE * len(voters)


class CommonFaults:
    """Counts of checked and failed nodes, fed with every verdict."""

    def __init__(self) -> None:
        self._counts: OrderedDict[Cause, _Count] = OrderedDict()

    def note(self, cause: Cause, node_id: str, *, is_established: bool, failed: bool) -> None:
        """Count a check of a node of the class on this version or group. `is_established`: the node was proven."""
        count = self._counts.pop(cause, None) or _Count()
        self._counts[cause] = count
        if len(self._counts) > KEPT:
            self._counts.popitem(last=False)
        if node_id in count.checked or len(count.checked) < MOST_NODES:
            count.checked[node_id] = is_established or count.checked.get(node_id, False)
            if failed:
                count.failed.add(node_id)

    def suspended(self, causes: tuple[Cause, ...]) -> Cause | None:
        """Return the first suspended cause among these, or None."""
        return next((cause for cause in causes if (c := self._counts.get(cause)) is not None and c.is_common), None)

    def failed(self, cause: Cause) -> tuple[str, ...]:
        """Return the nodes that failed for this cause, sorted."""
        return tuple(sorted(self._counts[cause].failed))

    @property
    def all_suspended(self) -> tuple[Cause, ...]:
        """Return all suspended causes, the latest last."""
        return tuple(cause for cause, count in self._counts.items() if count.is_common)
